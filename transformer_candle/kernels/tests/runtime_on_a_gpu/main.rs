//! The GPU runtime: buffers, memory, graphs, transfers, timing. Needs a GPU, or the emulated driver of
//! `tests/cuda_emulator`:
//! `cargo test -p kernels --features cuda --test runtime_on_a_gpu -- --ignored --test-threads=1`. The tests run one
//! after the other, as they look at the memory in use.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod graphs;
mod memory;
mod transfers;

use kernels::{Buffer, DType, Device, Error, GraphCache, Scalar, bf16, cuda, timing};

fn gpu() -> Device {
    Device::cuda(0).unwrap()
}

fn zeros(shape: &[usize], device: &Device) -> Buffer {
    Buffer::zeros(shape, DType::F32, device).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn every_element_type_is_written_read_copied_and_zeroed() {
    fn round_trip<T: Scalar>(values: &[T], zero: T, device: &Device) {
        let mut source = Buffer::zeros(&[values.len()], T::DTYPE, device).unwrap();
        assert!(source.read::<T>().unwrap() == vec![zero; values.len()], "zero at first");
        source.write(values).unwrap();
        let mut copy = Buffer::zeros(&[values.len()], T::DTYPE, device).unwrap();
        copy.copy_from(&source).unwrap();
        assert!(copy.read::<T>().unwrap() == values);
        copy.zero().unwrap();
        assert!(copy.read::<T>().unwrap() == vec![zero; values.len()]);
    }
    let gpu = gpu();
    round_trip(&[1.5f32, -2.0, 3.0], 0.0, &gpu);
    round_trip(&[bf16::ONE, bf16::MAX, bf16::NEG_ONE], bf16::ZERO, &gpu);
    round_trip(&[7u32, u32::MAX], 0, &gpu);
    round_trip(&[-7i32, i32::MIN], 0, &gpu);
    round_trip(&[-7i16, i16::MIN, 3], 0, &gpu);
    round_trip::<f32>(&[], 0.0, &gpu);
}

#[test]
#[ignore = "needs a GPU"]
fn views_share_memory_and_overlaps_are_refused() {
    let gpu = gpu();
    let mut whole = zeros(&[3, 4], &gpu);
    let mut row = whole.view(4, &[4]).unwrap();
    row.write(&[1f32, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!(whole.read::<f32>().unwrap()[3..9], [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]);
    assert!(matches!(whole.copy_from(&whole.view(0, &[3, 4]).unwrap()), Err(Error::Aliased { .. })));
    assert!(matches!(row.copy_from(&zeros(&[4], &Device::Cpu)), Err(Error::Unsupported { .. })));
    let other = Device::cuda(0).unwrap();
    assert!(matches!(row.copy_from(&zeros(&[4], &other)), Err(Error::Unsupported { .. })), "another stream");
}

#[test]
#[ignore = "needs a GPU"]
fn the_gpu_reports_its_properties() {
    let device = gpu();
    let cuda_device = device.as_cuda().unwrap();
    let gpu_info = &cuda::probe().unwrap()[0];
    assert_eq!((cuda_device.ordinal(), cuda_device.name()), (0, gpu_info.name.as_str()));
    assert_eq!(cuda_device.compute_capability(), gpu_info.compute_capability);
    assert!(cuda_device.fingerprint().contains("cuBLASLt"), "{}", cuda_device.fingerprint());
    let memory = cuda_device.memory().unwrap();
    assert!(memory.free < memory.total && memory.total <= gpu_info.total_bytes);
    let error = Device::cuda(1000).unwrap_err();
    assert!(error.to_string().starts_with("cannot use cuda:1000: the NVIDIA driver lists "), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn timing_measures_operations_by_name_without_replay() {
    let device = gpu();
    let (source, mut target) = (zeros(&[1 << 20], &device), zeros(&[1 << 20], &device));
    let (mut graphs, mut runs) = (GraphCache::default(), 0);
    let ((), times) = timing::measure(&device, || {
        for _ in 0..3 {
            graphs.run(&device, 1, || {
                runs += 1;
                target.copy_from(&source)?;
                target.zero()
            })?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(runs, 3);
    assert_eq!(times.keys().copied().collect::<Vec<_>>(), ["Buffer::copy_from", "Buffer::zero"]);
    assert!(times.values().all(|time| !time.is_zero()), "{times:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn threads_share_the_stream() {
    let device = gpu();
    let buffers: Vec<Buffer> = (0..8).map(|_| zeros(&[256], &device)).collect();
    std::thread::scope(|scope| {
        for (index, pair) in buffers.chunks_exact(2).enumerate() {
            let (mut buffer, mut source, device) = (pair[0].clone(), pair[1].clone(), &device);
            scope.spawn(move || {
                let mut graphs = GraphCache::default();
                for turn in 0..6 {
                    source.write(&[(index * 10 + turn) as f32; 256]).unwrap();
                    graphs.run(device, 1, || buffer.copy_from(&source)).unwrap();
                    assert_eq!(buffer.read::<f32>().unwrap(), [(index * 10 + turn) as f32; 256]);
                    assert!(device.as_cuda().unwrap().memory().unwrap().free > 0);
                }
            });
        }
    });
}
