//! Allocation, limits and freeing.

use kernels::memory::{Arena, Category, count};
use kernels::{Buffer, DType, Error, GraphCache};

use super::{gpu, zeros};

#[test]
#[ignore = "needs a GPU"]
fn freed_memory_returns_and_the_limit_holds() {
    let device = gpu();
    let cuda_device = device.as_cuda().unwrap();
    let before = cuda_device.memory().unwrap();
    let size = 64 << 20;
    let buffer = zeros(&[size / 4], &device);
    cuda_device.synchronize().unwrap();
    let with = cuda_device.memory().unwrap();
    assert!(before.free - with.free >= size as u64);
    drop(buffer);
    cuda_device.synchronize().unwrap();
    assert!(cuda_device.memory().unwrap().free > with.free + size as u64 / 2, "what is freed counts as free");

    let used_bytes = before.total - before.free;
    cuda_device.set_memory_limit(used_bytes + size as u64 + (4 << 20));
    let buffer = zeros(&[size / 4], &device);
    let error = Buffer::zeros(&[size / 4], DType::F32, &device).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: Some(_), .. }), "{error}");
    drop(buffer);
    cuda_device.synchronize().unwrap();
    zeros(&[size / 4], &device);
}

#[test]
#[ignore = "needs a GPU"]
fn any_thread_may_drop_buffers_and_graphs() {
    let device = gpu();
    let cuda_device = device.as_cuda().unwrap();
    let before = cuda_device.memory().unwrap();
    let (buffer, mut graphs) = (zeros(&[1 << 20], &device), GraphCache::default());
    let mut target = zeros(&[1 << 20], &device);
    for _ in 0..2 {
        graphs.run(&device, 1, || target.copy_from(&buffer)).unwrap();
    }
    std::thread::spawn(move || drop((buffer, target, graphs))).join().unwrap();
    cuda_device.synchronize().unwrap();
    assert_eq!(cuda_device.memory().unwrap(), before);
}

#[test]
#[ignore = "needs a GPU"]
fn a_plan_that_does_not_fit_allocates_nothing() {
    let device = gpu();
    let cuda_device = device.as_cuda().unwrap();
    let before = cuda_device.memory().unwrap();
    let mut arena = Arena::counting();
    arena.take("small", Category::Scratch, DType::F32, &[1 << 20]);
    arena.take("large", Category::Scratch, DType::F32, &[before.total as usize / 4]);
    let error = arena.plan().clone().allocate(&device).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: None, .. }), "{error}");
    assert_eq!(cuda_device.memory().unwrap(), before);
}

#[test]
#[ignore = "needs a GPU"]
fn a_plan_makes_one_allocation_per_element_type() {
    let gpu = gpu();
    let cuda_device = gpu.as_cuda().unwrap();
    let types = [DType::F32, DType::BF16, DType::I16];
    let take = |arena: &mut Arena| {
        let take = |i: usize| arena.take("", Category::Scratch, types[i % 3], &[1 + i * i]);
        Ok::<Vec<Buffer>, Error>((0..90).map(take).collect())
    };
    let (_, plan) = count(take).unwrap();
    let before = cuda_device.memory().unwrap().free;
    let buffers = take(&mut plan.clone().allocate(&gpu).unwrap()).unwrap();
    let allocated = before - cuda_device.memory().unwrap().free;
    let alignment = 256;
    assert!(allocated <= plan.bytes() + 90 * alignment + 3 * 512, "{allocated} bytes for a plan of {}", plan.bytes());
    for dtype in types {
        let of_type = buffers.iter().zip(plan.buffers()).filter(|(_, planned)| planned.dtype == dtype);
        let mut end = None;
        for (buffer, planned) in of_type {
            let address = buffer.address() as u64;
            assert_eq!(address % alignment, 0);
            assert!(end.is_none_or(|end| end == address), "buffers of one type are adjacent");
            end = Some((address + planned.bytes()).next_multiple_of(alignment));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_allocation_waits_for_freed_memory() {
    let gpu = gpu();
    let cuda_device = gpu.as_cuda().unwrap();
    let most = cuda_device.memory().unwrap().free / 10 * 8 / 4;
    let whole = || Buffer::zeros(&[most as usize], DType::F32, &gpu);
    let first = whole().unwrap();
    // Freed in stream order: not before what is launched already has run.
    drop(first);
    drop(whole().unwrap());
    cuda_device.set_memory_limit(cuda_device.memory().unwrap().total);
    drop(whole().unwrap());
    assert!(whole().is_ok());
}
