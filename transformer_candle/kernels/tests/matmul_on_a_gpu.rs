//! The linear map on a GPU beside the CPU's, and the choice of algorithms. A GPU, or the emulated driver of
//! `tests/cuda_emulator`: `cargo test -p kernels --features cuda --test matmul_on_a_gpu -- --ignored`.

#![cfg(feature = "cuda")]
#![allow(non_snake_case, clippy::unwrap_used, clippy::float_cmp)]

use std::collections::BTreeMap;

use kernels::{Buffer, DType, Device, GraphCache, WriteMode, bf16, linear};

/// Integers so small that every GEMM and sum is exact in F32, whatever the order: both devices must agree to the bit.
fn small_integers(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 31 + seed * 17 + at / 7) % 9) as f32 - 4.0).collect()
}

fn buffer(values: &[f32], shape: &[usize], dtype: DType, device: &Device) -> Buffer {
    let mut buffer = Buffer::zeros(shape, dtype, device).unwrap();
    match dtype {
        DType::BF16 => buffer.write(&values.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()).unwrap(),
        _ => buffer.write(values).unwrap(),
    }
    buffer
}

/// Results of the linear map of these sizes: y, dx and dw, and dw added to `small_integers(4, ..)`.
fn linear_results([n, i, o]: [usize; 3], dtype: DType, device: &Device) -> [Vec<f32>; 4] {
    let x = buffer(&small_integers(1, n * i), &[n, i], dtype, device);
    let w = buffer(&small_integers(2, o * i), &[o, i], dtype, device);
    let dy = buffer(&small_integers(3, n * o), &[n, o], dtype, device);
    let [mut dw, mut total] = [(); 2].map(|()| buffer(&small_integers(4, o * i), &[o, i], DType::F32, device));
    let (mut y, mut dx) = (buffer(&[], &[0, o], dtype, device), buffer(&[], &[0, i], dtype, device));
    if n > 0 {
        y = buffer(&vec![f32::NAN; n * o], &[n, o], dtype, device);
        dx = buffer(&vec![f32::NAN; n * i], &[n, i], dtype, device);
    }
    let elements = linear::workspace_elements(n, i, o, device.kind());
    let mut workspace = Buffer::zeros(&[elements], DType::F32, device).unwrap();
    linear::forward(&x, &w, &mut y, &mut workspace).unwrap();
    linear::backward_input(&dy, &w, &mut dx, &mut workspace).unwrap();
    linear::backward_weight(&dy, &x, &mut dw, WriteMode::Overwrite, &mut workspace).unwrap();
    linear::backward_weight(&dy, &x, &mut total, WriteMode::Accumulate, &mut workspace).unwrap();
    [y, dx, dw, total].map(|result| result.read_f32().unwrap())
}

const SIZES: [[usize; 3]; 6] = [[1, 64, 96], [5, 16, 8], [33, 48, 80], [7, 5, 3], [128, 64, 192], [0, 16, 8]];

#[test]
#[ignore = "needs a GPU"]
fn the_first_call_and_the_next_equal_the_cpus() {
    let gpu = Device::cuda(0).unwrap();
    for sizes in SIZES {
        for dtype in [DType::F32, DType::BF16] {
            let expected = linear_results(sizes, dtype, &Device::Cpu);
            for call in ["first", "second"] {
                assert_eq!(linear_results(sizes, dtype, &gpu), expected, "{sizes:?} {dtype:?}, {call} call");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn algorithms_are_recalled_on_the_same_gpu_and_library() {
    let (one, other) = (Device::cuda(0).unwrap(), Device::cuda(0).unwrap());
    let (one, other_gpu) = ((one.as_cuda().unwrap(), &one), other.as_cuda().unwrap());
    linear_results([133, 48, 80], DType::BF16, one.1);
    let choices = one.0.choices();
    let names: Vec<&str> = choices.keys().map(|name| name.split(" a ").next().unwrap()).collect();
    assert_eq!(names, ["133x48x80", "133x80x48", "80x48x133", "80x48x133"]);

    assert!(other_gpu.choices().is_empty());
    assert_eq!(other_gpu.recall_choices(&choices).unwrap(), [""; 0]);
    assert_eq!(other_gpu.choices(), choices);
    linear_results([133, 48, 80], DType::BF16, &other);
    assert_eq!(other_gpu.choices(), choices, "a choice that was recalled is not made again");

    let of_another_library = |text: &str| text.replace("cuBLASLt ", "cuBLASLt 9");
    let foreign: BTreeMap<_, _> = choices.iter().map(|(name, text)| (name.clone(), of_another_library(text))).collect();
    let third = Device::cuda(0).unwrap();
    let refused = third.as_cuda().unwrap().recall_choices(&foreign).unwrap();
    assert_eq!(refused, foreign.keys().cloned().collect::<Vec<_>>());
    let nonsense = BTreeMap::from([("no shape".to_owned(), "no algorithm".to_owned())]);
    assert_eq!(third.as_cuda().unwrap().recall_choices(&nonsense).unwrap(), ["no shape"]);
    assert!(third.as_cuda().unwrap().choices().is_empty());
}

#[test]
#[ignore = "needs a GPU"]
fn generation_of_few_rows_searches_and_keeps_nothing() {
    let device = Device::cuda(0).unwrap();
    let choices = |n: usize| {
        let [x, w] =
            [[n, 48], [80, 48]].map(|shape| buffer(&small_integers(1, shape[0] * 48), &shape, DType::BF16, &device));
        let mut y = Buffer::zeros(&[n, 80], DType::BF16, &device).unwrap();
        let elements = linear::workspace_elements(n, 48, 80, device.kind());
        let mut workspace = Buffer::zeros(&[elements], DType::F32, &device).unwrap();
        linear::forward(&x, &w, &mut y, &mut workspace).unwrap();
        device.as_cuda().unwrap().choices().len()
    };
    assert_eq!([1, 33, 128, 129].map(choices), [0, 0, 0, 1]);
}

#[test]
#[ignore = "needs a GPU"]
fn a_deterministic_device_takes_what_is_offered_first() {
    let choices = |is_deterministic| {
        let device = Device::cuda(0).unwrap();
        device.as_cuda().unwrap().set_deterministic(is_deterministic);
        (150..170).for_each(|n| drop(linear_results([n, 48, 80], DType::BF16, &device)));
        device.as_cuda().unwrap().choices()
    };
    assert_eq!(choices(true), choices(true));
    assert_eq!(choices(true).len(), choices(false).len());
}

#[test]
#[ignore = "needs a GPU"]
fn a_gemm_has_the_same_bits_every_time() {
    let gpu = Device::cuda(0).unwrap();
    let sines = |count: usize| (0..count).map(|at| (at as f32 * 0.7).sin()).collect::<Vec<_>>();
    // A long sum for few results: a library may split it over blocks, whose order could vary.
    let [n, i, o] = [2048, 16, 32];
    for dtype in [DType::F32, DType::BF16] {
        let (dy, x) = (buffer(&sines(n * o), &[n, o], dtype, &gpu), buffer(&sines(n * i), &[n, i], dtype, &gpu));
        let start = buffer(&sines(o * i), &[o, i], DType::F32, &gpu);
        let mut dw = Buffer::zeros(&[o, i], DType::F32, &gpu).unwrap();
        let elements = linear::workspace_elements(n, i, o, gpu.kind());
        let mut workspace = Buffer::zeros(&[elements], DType::F32, &gpu).unwrap();
        let mut results = (0..20).map(|_| {
            dw.copy_from(&start).unwrap();
            linear::backward_weight(&dy, &x, &mut dw, WriteMode::Accumulate, &mut workspace).unwrap();
            dw.read::<f32>().unwrap()
        });
        let first = results.next().unwrap();
        assert!(results.all(|result| result == first), "{dtype:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_gpus_speed_is_a_number() {
    let gpu = Device::cuda(0).unwrap();
    let flops = gpu.as_cuda().unwrap().measure_gemm_flops(256).unwrap();
    assert!(flops.is_finite() && flops > 0.0, "{flops}");
}

#[test]
#[ignore = "needs a GPU"]
fn gemms_replay_and_must_run_before_capture() {
    let gpu = Device::cuda(0).unwrap();
    let operands = |n: usize| {
        let (x, w) = (small_integers(1, n * 16), small_integers(2, 8 * 16));
        let (x, w) = (buffer(&x, &[n, 16], DType::F32, &gpu), buffer(&w, &[8, 16], DType::F32, &gpu));
        let workspace = linear::workspace_elements(n, 16, 8, gpu.kind());
        let [y, workspace] =
            [vec![n, 8], vec![workspace]].map(|shape| Buffer::zeros(&shape, DType::F32, &gpu).unwrap());
        (x, w, y, workspace)
    };
    let forward = |(x, w, y, workspace): &mut (Buffer, Buffer, Buffer, Buffer)| linear::forward(x, w, y, workspace);
    let (mut searched_operands, mut other_operands, mut graphs) = (operands(5), operands(6), GraphCache::default());

    graphs.run(&gpu, 1, || forward(&mut searched_operands)).unwrap();
    let expected = searched_operands.2.read::<f32>().unwrap();
    let error = graphs.run(&gpu, 1, || forward(&mut other_operands)).unwrap_err().to_string();
    assert!(error.contains("6x8x16") && error.contains("run it once before"), "{error}");
    for _ in 0..3 {
        searched_operands.2.zero().unwrap();
        graphs.run(&gpu, 1, || forward(&mut searched_operands)).unwrap();
        assert_eq!(searched_operands.2.read::<f32>().unwrap(), expected);
    }
}
