//! The GPU runtime: memory, copies, ordering, graphs, timing. A GPU, or the emulated driver of `tests/cuda_emulator`:
//! `cargo test -p kernels --features cuda --test runtime_on_a_gpu -- --ignored --test-threads=1`.
//! One after the other, as they look at the memory in use.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use kernels::memory::{Category, Plan};
use kernels::{Buffer, DType, Device, Download, Error, GraphCache, Scalar, Upload, bf16, cuda, swiglu, timing};

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
    assert!(matches!(whole.copy_from(&whole.reshaped(&[3, 4]).unwrap()), Err(Error::Aliased { .. })));
    assert!(matches!(row.copy_from(&zeros(&[4], &Device::Cpu)), Err(Error::Unsupported { .. })));
    let other = Device::cuda(0).unwrap();
    assert!(matches!(row.copy_from(&zeros(&[4], &other)), Err(Error::Unsupported { .. })), "another stream");
}

#[test]
#[ignore = "needs a GPU"]
fn the_gpu_says_what_it_is() {
    let device = gpu();
    let opened = device.as_cuda().unwrap();
    let listed = &cuda::probe().unwrap()[0];
    assert_eq!((opened.ordinal(), opened.name()), (0, listed.name.as_str()));
    assert_eq!(opened.compute_capability(), listed.compute_capability);
    assert!(opened.fingerprint().contains("cuBLASLt"), "{}", opened.fingerprint());
    let memory = opened.memory().unwrap();
    assert!(memory.free < memory.total && memory.total <= listed.total_bytes);
    let error = Device::cuda(1000).unwrap_err();
    assert!(error.to_string().starts_with("cannot use cuda:1000: the NVIDIA driver lists "), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn memory_comes_back_and_a_limit_holds() {
    let device = gpu();
    let opened = device.as_cuda().unwrap();
    let before = opened.memory().unwrap();
    let size = 64 << 20;
    let buffer = zeros(&[size / 4], &device);
    opened.synchronize().unwrap();
    let with = opened.memory().unwrap();
    assert!(before.free - with.free >= size as u64);
    drop(buffer);
    opened.synchronize().unwrap();
    assert!(opened.memory().unwrap().free > with.free + size as u64 / 2, "what is freed counts as free");

    let taken = before.total - before.free;
    opened.set_memory_limit(taken + size as u64 + (4 << 20));
    let buffer = zeros(&[size / 4], &device);
    let error = Buffer::zeros(&[size / 4], DType::F32, &device).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: Some(_), .. }), "{error}");
    drop(buffer);
    opened.synchronize().unwrap();
    zeros(&[size / 4], &device);
}

#[test]
#[ignore = "needs a GPU"]
fn a_thread_that_never_used_the_gpu_may_drop_what_lies_there() {
    let device = gpu();
    let opened = device.as_cuda().unwrap();
    let before = opened.memory().unwrap();
    let (buffer, mut graphs) = (zeros(&[1 << 20], &device), GraphCache::default());
    let mut target = zeros(&[1 << 20], &device);
    for _ in 0..2 {
        graphs.run(&device, 1, || target.copy_from(&buffer)).unwrap();
    }
    std::thread::spawn(move || drop((buffer, target, graphs))).join().unwrap();
    opened.synchronize().unwrap();
    assert_eq!(opened.memory().unwrap(), before);
}

#[test]
#[ignore = "needs a GPU"]
fn a_plan_that_does_not_fit_allocates_nothing() {
    let device = gpu();
    let opened = device.as_cuda().unwrap();
    let before = opened.memory().unwrap();
    let mut plan = Plan::new();
    plan.add("small", Category::Scratch, DType::F32, &[1 << 20]);
    plan.add("large", Category::Scratch, DType::F32, &[before.total as usize / 4]);
    let error = plan.allocate(&device).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: None, .. }), "{error}");
    assert_eq!(opened.memory().unwrap(), before);
}

/// Adds 1 to what `value` counts, with copies alone: the next of `numbers` goes there.
#[test]
#[ignore = "needs a GPU"]
fn a_plan_takes_one_allocation_for_each_element_type() {
    let gpu = gpu();
    let opened = gpu.as_cuda().unwrap();
    let mut plan = Plan::new();
    let types = [DType::F32, DType::BF16, DType::I16];
    let ids: Vec<_> = (0..90).map(|i| plan.add("", Category::Scratch, types[i % 3], &[1 + i * i])).collect();
    let before = opened.memory().unwrap().free;
    let arena = plan.allocate(&gpu).unwrap();
    let taken = before - opened.memory().unwrap().free;
    let alignment = 256;
    assert!(taken <= plan.bytes() + 90 * alignment + 3 * 512, "{taken} bytes for a plan of {}", plan.bytes());
    for dtype in types {
        let of_type = ids.iter().zip(plan.buffers()).filter(|(_, planned)| planned.dtype == dtype);
        let mut end = None;
        for (id, planned) in of_type {
            let address = arena.buffer(*id).address() as u64;
            assert_eq!(address % alignment, 0);
            assert!(end.is_none_or(|end| end == address), "buffers of one type lie behind each other");
            end = Some((address + planned.bytes()).next_multiple_of(alignment));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn freed_memory_is_waited_for_before_a_refusal() {
    let gpu = gpu();
    let opened = gpu.as_cuda().unwrap();
    let most = opened.memory().unwrap().free / 10 * 8 / 4;
    let whole = || Buffer::zeros(&[most as usize], DType::F32, &gpu);
    let first = whole().unwrap();
    // Freed in the stream's order: behind whatever the stream has not done yet.
    drop(first);
    drop(whole().unwrap());
    opened.set_memory_limit(opened.memory().unwrap().total);
    drop(whole().unwrap());
    assert!(whole().is_ok());
}

fn body(numbers: &[Buffer], value: &mut Buffer) -> kernels::Result<()> {
    numbers.iter().try_for_each(|number| value.copy_from(number))
}

#[test]
#[ignore = "needs a GPU"]
fn a_recording_repeats_what_was_asked_with_what_is_there_then() {
    let device = gpu();
    let (mut source, mut target) = (zeros(&[4], &device), zeros(&[4], &device));
    let (mut graphs, mut runs) = (GraphCache::default(), 0);
    for turn in 0..5 {
        source.write(&[turn as f32; 4]).unwrap();
        let outcome = graphs.run(&device, 1, || {
            runs += 1;
            body(std::slice::from_ref(&source), &mut target)
        });
        outcome.unwrap();
        assert_eq!(target.read::<f32>().unwrap(), [turn as f32; 4]);
    }
    assert_eq!(runs, 2, "once done, once recorded");
    graphs
        .run(&device, 2, || {
            runs += 1;
            target.zero()
        })
        .unwrap();
    assert_eq!((runs, target.read::<f32>().unwrap()), (3, vec![0.0; 4]), "another key is another graphs");
    let mut eager = GraphCache::eager();
    for _ in 0..3 {
        eager
            .run(&device, 1, || {
                runs += 1;
                Ok::<(), Error>(())
            })
            .unwrap();
    }
    assert_eq!(runs, 6);
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_computes_what_the_cpu_does_recorded_or_not() {
    let values: Vec<bf16> = (0..5 * 96).map(|at| bf16::from_f32((at % 23) as f32 / 7.0 - 1.5)).collect();
    let on = |device: &Device| {
        let mut gate_up = Buffer::zeros(&[5, 96], DType::BF16, device).unwrap();
        gate_up.write(&values).unwrap();
        let mut out = Buffer::zeros(&[5, 48], DType::BF16, device).unwrap();
        let mut graphs = GraphCache::default();
        let results = (0..3).map(|_| {
            out.zero().unwrap();
            graphs.run(device, 1, || swiglu::forward(&gate_up, &mut out)).unwrap();
            out.read_f32().unwrap()
        });
        results.collect::<Vec<_>>()
    };
    let (expected, actual) = (on(&Device::Cpu), on(&gpu()));
    assert!(actual[0] == actual[1] && actual[0] == actual[2]);
    for (actual, expected) in actual[0].iter().zip(&expected[0]) {
        assert!((actual - expected).abs() <= 0.01 * expected.abs() + 1e-6, "{actual} {expected}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_upload_lands_beside_its_target_and_not_in_it() {
    let device = gpu();
    // As the buffers of a plan: one allocation.
    let whole = zeros(&[64], &device);
    let [target, staging, overlapping] = [0, 16, 15].map(|first| whole.view(first, &[16]).unwrap());
    let mut upload = Upload::<f32>::new(target.clone(), Some(staging)).unwrap();
    upload.stage().unwrap().fill(7.0);
    upload.send().unwrap();
    upload.receive().unwrap();
    assert_eq!(target.read::<f32>().unwrap(), [7.0; 16]);
    for staging in [overlapping, target.clone(), zeros(&[16], &gpu())] {
        let error = Upload::<f32>::new(target.clone(), Some(staging)).unwrap_err().to_string();
        assert!(error.contains("memory of its own"), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_recording_keeps_its_buffers_alive() {
    let device = gpu();
    let target = zeros(&[1 << 16], &device);
    let mut graphs = GraphCache::default();
    {
        let mut source = zeros(&[1 << 16], &device);
        source.write(&vec![3f32; 1 << 16]).unwrap();
        let mut to = target.clone();
        for _ in 0..2 {
            graphs.run(&device, 1, || to.copy_from(&source)).unwrap();
        }
    }
    let mut others: Vec<_> = (0..8).map(|_| zeros(&[1 << 16], &device)).collect();
    for other in &mut others {
        other.write(&vec![9f32; 1 << 16]).unwrap();
    }
    graphs.run(&device, 1, || -> kernels::Result<()> { unreachable!("it was recorded") }).unwrap();
    assert_eq!(target.read::<f32>().unwrap(), vec![3f32; 1 << 16]);
    drop((target, graphs));
    device.synchronize().unwrap();
}

type Attempt<'a> = Box<dyn FnMut() -> kernels::Result<()> + 'a>;

#[test]
#[ignore = "needs a GPU"]
fn unsupported_capture_is_refused() {
    let device = gpu();
    let mut buffer = zeros(&[4], &device);
    let upload = std::cell::RefCell::new(Upload::<f32>::new(zeros(&[4], &device), Some(zeros(&[4], &device))).unwrap());
    upload.borrow_mut().send().unwrap();
    let mut refused: Vec<(&str, Attempt<'_>)> = vec![
        ("reading", Box::new(|| buffer.read::<f32>().map(drop))),
        ("allocating", Box::new(|| Buffer::zeros(&[1], DType::F32, &device).map(drop))),
        ("waiting", Box::new(|| device.synchronize())),
        ("receiving", Box::new(|| upload.borrow_mut().receive())),
    ];
    for (what, attempt) in &mut refused {
        let mut graphs = GraphCache::default();
        graphs.run(&device, 1, || Ok::<(), Error>(())).unwrap();
        let error = graphs.run(&device, 1, attempt).unwrap_err();
        assert!(error.to_string().contains("cannot be part of it"), "{what}: {error}");
    }
    drop(refused);
    buffer.write(&[5f32; 4]).unwrap();
    assert_eq!(buffer.read::<f32>().unwrap(), [5.0; 4]);

    let mut graphs = GraphCache::default();
    let no = || Err(Error::Invalid { operation: "test", problem: "no".to_owned() });
    graphs.run(&device, 1, || Ok::<(), Error>(())).unwrap();
    assert!(graphs.run(&device, 1, || buffer.zero().and_then(|()| no())).is_err());
    assert_eq!(buffer.read::<f32>().unwrap(), [5.0; 4], "what was recorded in vain is not done");
    let mut runs = 0;
    for _ in 0..2 {
        graphs
            .run(&device, 1, || {
                runs += 1;
                buffer.zero()
            })
            .unwrap();
    }
    assert_eq!((runs, buffer.read::<f32>().unwrap()), (2, vec![0.0; 4]), "the key begins again");
}

#[test]
#[ignore = "needs a GPU"]
fn a_panic_while_recording_leaves_the_gpu_usable() {
    let device = gpu();
    let mut buffer = zeros(&[4], &device);
    let mut graphs = GraphCache::default();
    graphs.run(&device, 1, || Ok::<(), Error>(())).unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        graphs.run(&device, 1, || -> kernels::Result<()> {
            buffer.zero()?;
            panic!("on purpose")
        })
    }));
    assert!(outcome.is_err());
    buffer.write(&[2f32; 4]).unwrap();
    assert_eq!(buffer.read::<f32>().unwrap(), [2.0; 4]);
}

#[test]
#[ignore = "needs a GPU"]
fn uploads_arrive_in_order_while_two_alternate() {
    let device = gpu();
    let target = Buffer::zeros(&[1000], DType::U32, &device).unwrap();
    let mut uploads = [(); 2].map(|()| {
        let staging = Buffer::zeros(&[1000], DType::U32, &device).unwrap();
        Upload::<u32>::new(target.clone(), Some(staging)).unwrap()
    });
    let (mut graphs, mut copies) = (GraphCache::default(), Buffer::zeros(&[1000], DType::U32, &device).unwrap());
    uploads[0].stage().unwrap().fill(0);
    uploads[0].send().unwrap();
    for turn in 0..6u32 {
        let next = &mut uploads[(turn as usize + 1) % 2];
        next.stage().unwrap().fill(turn + 1);
        next.send().unwrap();
        uploads[turn as usize % 2].receive().unwrap();
        graphs.run(&device, 1, || copies.copy_from(&target)).unwrap();
        assert_eq!(copies.read::<u32>().unwrap(), vec![turn; 1000]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_second_upload_waits_until_the_first_was_taken() {
    let device = gpu();
    let (target, staging) = (zeros(&[100], &device), zeros(&[100], &device));
    let mut seen: Vec<Buffer> = (0..4).map(|_| zeros(&[100], &device)).collect();
    let mut upload = Upload::<f32>::new(target.clone(), Some(staging)).unwrap();
    for (turn, seen) in seen.iter_mut().enumerate() {
        upload.stage().unwrap().fill(turn as f32);
        upload.send().unwrap();
        upload.receive().unwrap();
        seen.copy_from(&target).unwrap();
    }
    for (turn, seen) in seen.iter().enumerate() {
        assert_eq!(seen.read::<f32>().unwrap(), [turn as f32; 100]);
    }
    upload.send().unwrap();
    drop(upload);
    device.synchronize().unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn a_download_shows_the_buffer_as_it_was_when_it_was_started() {
    let device = gpu();
    let (mut source, mut one) = (zeros(&[3], &device), zeros(&[3], &device));
    one.write(&[1f32; 3]).unwrap();
    let mut downloads = [(); 2].map(|()| Download::<f32>::new(source.clone()).unwrap());
    downloads[0].start().unwrap();
    source.copy_from(&one).unwrap();
    downloads[1].start().unwrap();
    source.zero().unwrap();
    assert_eq!(downloads[0].values().unwrap(), [0.0; 3]);
    assert_eq!(downloads[1].values().unwrap(), [1.0; 3]);
    downloads[1].start().unwrap();
    assert_eq!(downloads[1].values().unwrap(), [0.0; 3]);
    downloads[0].start().unwrap();
    drop(downloads);
}

#[test]
#[ignore = "needs a GPU"]
fn operations_are_measured_by_name_and_not_replayed_meanwhile() {
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
fn threads_take_turns() {
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

#[test]
#[ignore = "needs a GPU"]
fn others_wait_while_a_thread_records() {
    let device = gpu();
    let (mut source, mut target, mut other) = (zeros(&[16], &device), zeros(&[16], &device), zeros(&[16], &device));
    source.write(&[3f32; 16]).unwrap();
    let (begun, begin) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let device = &device;
        scope.spawn(move || {
            let mut graphs = GraphCache::default();
            begin.recv().unwrap();
            let mut own = zeros(&[16], device);
            own.write(&[7f32; 16]).unwrap();
            device.synchronize().unwrap();
            for _ in 0..3 {
                graphs.run(device, 1, || other.copy_from(&own)).unwrap();
            }
            assert_eq!(other.read::<f32>().unwrap(), [7.0; 16]);
        });
        let mut graphs = GraphCache::default();
        for turn in 0..3 {
            let outcome = graphs.run(device, 1, || {
                if turn == 1 {
                    begun.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                target.copy_from(&source)
            });
            outcome.unwrap();
        }
        assert_eq!(target.read::<f32>().unwrap(), [3.0; 16]);
    });
}
