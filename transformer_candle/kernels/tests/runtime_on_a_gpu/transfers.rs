//! Uploads and downloads, which overlap with the compute stream.

use kernels::{Buffer, DType, Download, GraphCache, Upload};

use super::{gpu, zeros};

#[test]
#[ignore = "needs a GPU"]
fn an_upload_needs_staging_apart_from_its_target() {
    let device = gpu();
    // Views of one allocation, as the buffers of a plan are.
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
fn two_alternating_uploads_arrive_in_order() {
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
fn staging_waits_until_the_last_upload_was_received() {
    let device = gpu();
    let (target, staging) = (zeros(&[100], &device), zeros(&[100], &device));
    let mut copies: Vec<Buffer> = (0..4).map(|_| zeros(&[100], &device)).collect();
    let mut upload = Upload::<f32>::new(target.clone(), Some(staging)).unwrap();
    for (turn, copy) in copies.iter_mut().enumerate() {
        upload.stage().unwrap().fill(turn as f32);
        upload.send().unwrap();
        upload.receive().unwrap();
        copy.copy_from(&target).unwrap();
    }
    for (turn, copy) in copies.iter().enumerate() {
        assert_eq!(copy.read::<f32>().unwrap(), [turn as f32; 100]);
    }
    upload.send().unwrap();
    drop(upload);
    device.synchronize().unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn a_download_has_the_values_at_its_start() {
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
