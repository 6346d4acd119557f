//! CUDA graphs: capture, replay, and what a capture refuses.

use kernels::{Buffer, DType, Device, Error, GraphCache, Upload, bf16, swiglu};

use super::{gpu, zeros};

type Attempt<'a> = Box<dyn FnMut() -> kernels::Result<()> + 'a>;

#[test]
#[ignore = "needs a GPU"]
fn a_graph_replays_its_launches_on_current_values() {
    let device = gpu();
    let (mut source, mut target) = (zeros(&[4], &device), zeros(&[4], &device));
    let (mut graphs, mut runs) = (GraphCache::default(), 0);
    for run in 0..5 {
        source.write(&[run as f32; 4]).unwrap();
        let result = graphs.run(&device, 1, || {
            runs += 1;
            target.copy_from(&source)
        });
        result.unwrap();
        assert_eq!(target.read::<f32>().unwrap(), [run as f32; 4]);
    }
    assert_eq!(runs, 2, "launched once, captured once");
    graphs
        .run(&device, 2, || {
            runs += 1;
            target.zero()
        })
        .unwrap();
    assert_eq!((runs, target.read::<f32>().unwrap()), (3, vec![0.0; 4]), "another key is another graph");
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
fn a_kernel_equals_the_cpu_launched_or_replayed() {
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
fn a_graph_keeps_its_buffers_alive() {
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
    graphs.run(&device, 1, || -> kernels::Result<()> { unreachable!("it is replayed") }).unwrap();
    assert_eq!(target.read::<f32>().unwrap(), vec![3f32; 1 << 16]);
    drop((target, graphs));
    device.synchronize().unwrap();
}

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
    assert_eq!(buffer.read::<f32>().unwrap(), [5.0; 4], "a failed capture launches nothing");
    let mut runs = 0;
    for _ in 0..2 {
        graphs
            .run(&device, 1, || {
                runs += 1;
                buffer.zero()
            })
            .unwrap();
    }
    assert_eq!((runs, buffer.read::<f32>().unwrap()), (2, vec![0.0; 4]), "the next run with the key launches again");
}

#[test]
#[ignore = "needs a GPU"]
fn a_panic_during_capture_leaves_the_gpu_usable() {
    let device = gpu();
    let mut buffer = zeros(&[4], &device);
    let mut graphs = GraphCache::default();
    graphs.run(&device, 1, || Ok::<(), Error>(())).unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        graphs.run(&device, 1, || -> kernels::Result<()> {
            buffer.zero()?;
            panic!("on purpose")
        })
    }));
    assert!(result.is_err());
    buffer.write(&[2f32; 4]).unwrap();
    assert_eq!(buffer.read::<f32>().unwrap(), [2.0; 4]);
}

#[test]
#[ignore = "needs a GPU"]
fn other_threads_wait_during_a_capture() {
    let device = gpu();
    let (mut source, mut target, mut other) = (zeros(&[16], &device), zeros(&[16], &device), zeros(&[16], &device));
    source.write(&[3f32; 16]).unwrap();
    let (capture_started, started) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let device = &device;
        scope.spawn(move || {
            let mut graphs = GraphCache::default();
            started.recv().unwrap();
            let mut own = zeros(&[16], device);
            own.write(&[7f32; 16]).unwrap();
            device.synchronize().unwrap();
            for _ in 0..3 {
                graphs.run(device, 1, || other.copy_from(&own)).unwrap();
            }
            assert_eq!(other.read::<f32>().unwrap(), [7.0; 16]);
        });
        let mut graphs = GraphCache::default();
        for run in 0..3 {
            let result = graphs.run(device, 1, || {
                if run == 1 {
                    capture_started.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                target.copy_from(&source)
            });
            result.unwrap();
        }
        assert_eq!(target.read::<f32>().unwrap(), [3.0; 16]);
    });
}
