//! Times operations by name: on a CPU with the clock, on a GPU with events in its stream.
//!
//! [`measure`] adds the times up, [`record`] keeps every operation with its place in the scopes around it, and the
//! tasks of it that each thread of the pool ran. Outside of both an operation and a scope cost one look at a
//! thread-local variable.

mod pool_tasks;
mod recording;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use crate::cuda::{Cuda, Event};
use crate::{Device, Error, Result};
use recording::Recorder;

pub use pool_tasks::Task;
pub(crate) use pool_tasks::Tasks;
pub use recording::{Recording, Span, SpanKind};

thread_local! {
    /// The recorder of this thread; None outside of `measure` and `record`.
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Runs `body` and returns the total time per operation called on this thread, by name such as `linear::forward`. A
/// nested operation counts as part of the outer one.
///
/// On a GPU events surround every operation, graphs are neither captured nor replayed ([`crate::GraphCache`]), and the
/// stream is synchronized at the end.
///
/// ```
/// use kernels::{Buffer, DType, Device, timing};
///
/// let device = Device::Cpu;
/// let (bytes, times) = timing::measure(&device, || {
///     let mut buffer = Buffer::zeros(&[1000], DType::F32, &device)?;
///     buffer.zero()?;
///     Ok(4000)
/// })?;
/// assert_eq!(bytes, 4000);
/// assert!(times.contains_key("Buffer::zero"));
/// # Ok::<(), kernels::Error>(())
/// ```
///
/// # Errors
/// The body's, or the driver's.
pub fn measure<R>(device: &Device, body: impl FnOnce() -> Result<R>) -> Result<(R, BTreeMap<&'static str, Duration>)> {
    let (result, recording) = recorded(device, Recorder::new(Instant::now()), body)?;
    let mut times = BTreeMap::new();
    for operation in recording.operations() {
        *times.entry(operation.name).or_default() += operation.duration();
    }
    Ok((result, times))
}

/// Runs `body` and returns every scope and operation of this thread with its times since `origin`, and on a CPU also
/// the tasks of each operation that the threads of the current rayon pool ran. A nested operation is part of the outer
/// one. On a GPU it does what [`measure`] does.
///
/// ```
/// use std::time::Instant;
///
/// use kernels::{Buffer, DType, Device, timing};
///
/// let device = Device::Cpu;
/// let ((), recording) = timing::record(&device, Instant::now(), || {
///     let mut buffer = Buffer::zeros(&[1000], DType::F32, &device)?;
///     timing::scope("clear", || buffer.zero())
/// })?;
/// let names: Vec<_> = recording.spans.iter().map(|span| span.name).collect();
/// assert_eq!(names, ["clear", "Buffer::zero"]);
/// assert_eq!(recording.spans[1].parent, Some(0));
/// # Ok::<(), kernels::Error>(())
/// ```
///
/// # Errors
/// The body's, or the driver's.
pub fn record<R>(device: &Device, origin: Instant, body: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    recorded(device, Recorder::new(origin).with_tasks(), body)
}

fn recorded<R>(device: &Device, recorder: Recorder, body: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    device.synchronize()?;
    let recorder = recorder.starting_on(device)?;
    let installed = Installed::new(recorder);
    let result = body()?;
    device.synchronize()?;
    let recording = RECORDER.take().map_or_else(|| Ok(Recording::default()), Recorder::finish)?;
    drop(installed);
    Ok((result, recording))
}

/// Whether this thread is inside of [`measure`] or [`record`].
pub(crate) fn is_measuring() -> bool {
    RECORDER.with_borrow(Option::is_some)
}

/// Runs `body` as a scope of this name, which a recording shows around its operations.
pub fn scope<R>(name: &'static str, body: impl FnOnce() -> R) -> R {
    numbered_scope(name, None, body)
}

/// [`scope`] of one of several parts of that name, such as a layer.
pub fn scope_of<R>(name: &'static str, number: usize, body: impl FnOnce() -> R) -> R {
    numbered_scope(name, Some(number), body)
}

fn numbered_scope<R>(name: &'static str, number: Option<usize>, body: impl FnOnce() -> R) -> R {
    let _open = Open::scope(name, number);
    body()
}

/// Runs an operation and records it if this thread is recording.
pub(crate) fn operation<R>(name: &'static str, device: &Device, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let Some(open) = Open::operation(name) else { return body() };
    let from = device.as_cuda().map(Cuda::mark).transpose()?;
    let result = body()?;
    let events = match (from, device.as_cuda()) {
        (Some(from), Some(cuda)) => Some((from, cuda.mark()?)),
        _ => None,
    };
    RECORDER.with_borrow_mut(|recorder| {
        if let Some(recorder) = recorder {
            recorder.set_events(open.span, events);
        }
    });
    Ok(result)
}

/// A span of a GPU's compute stream, between two events.
pub struct StreamSpan {
    from: Event,
    to: Event,
}

impl StreamSpan {
    /// Runs `launch`, and returns the span of the device's stream from what was launched before to what was launched
    /// meanwhile, with any wait that `launch` put into the stream; None on a CPU.
    pub fn around<R, E: From<Error>>(
        device: &Device,
        launch: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Option<Self>), E> {
        let Some(cuda) = device.as_cuda() else { return Ok((launch()?, None)) };
        let from = cuda.mark()?;
        let launched = launch()?;
        Ok((launched, Some(Self { from, to: cuda.mark()? })))
    }

    /// Returns how long the GPU took for it, after waiting for its end.
    pub fn duration(&self) -> Result<Duration> {
        self.from.until(&self.to)
    }
}

impl fmt::Debug for StreamSpan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("StreamSpan").finish_non_exhaustive()
    }
}

/// The tasks of the operation that this thread is running, to be timed on the threads that take them.
pub(crate) fn tasks() -> Tasks {
    RECORDER.with_borrow(|recorder| recorder.as_ref().map_or_else(Tasks::none, Recorder::tasks))
}

/// Guard of an open span; dropped also on errors and panics.
struct Open {
    span: usize,
    parent: Option<usize>,
}

impl Open {
    fn scope(name: &'static str, number: Option<usize>) -> Option<Self> {
        RECORDER.with_borrow_mut(|recorder| recorder.as_mut().map(|recorder| recorder.begin(name, number)))
    }

    /// None outside of a recording and inside of another operation.
    fn operation(name: &'static str) -> Option<Self> {
        RECORDER.with_borrow_mut(|recorder| recorder.as_mut()?.begin_operation(name))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        RECORDER.with_borrow_mut(|recorder| {
            if let Some(recorder) = recorder {
                recorder.end(self);
            }
        });
    }
}

/// Guard of this thread's recording, which ends on drop, also after an error or a panic.
struct Installed {
    outer: Option<Recorder>,
}

impl Installed {
    fn new(recorder: Recorder) -> Self {
        Self { outer: RECORDER.replace(Some(recorder)) }
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        RECORDER.set(self.outer.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::access::Arguments;
    use crate::testing::*;

    /// An operation that takes a while, and then does something else. How long it was at work.
    fn work(operation: &'static str, then: impl FnOnce() -> Result<Duration>) -> Result<Duration> {
        let buffer = zeros(&[1], DType::F32);
        Arguments::new(operation).input("buffer", &buffer, DType::F32, &[1]).cpu(|_| {
            let from = Instant::now();
            std::hint::black_box(vec![1u8; 1 << 22].iter().map(|&one| u64::from(one)).sum::<u64>());
            let own = from.elapsed();
            Ok(own + then()?)
        })
    }

    const NOTHING: fn() -> Result<Duration> = || Ok(Duration::ZERO);

    fn no() -> Result<Duration> {
        Err(Error::Invalid { operation: "test", problem: "no".to_owned() })
    }

    #[test]
    fn times_add_up_by_name_and_nested_ones_count_once() {
        let ([a, b], times) = measure(&Device::Cpu, || {
            let a = work("a", NOTHING)? + work("a", || work("inner", NOTHING))?;
            Ok([a, work("b", NOTHING)?])
        })
        .unwrap();
        assert_eq!(times.keys().copied().collect::<Vec<_>>(), ["a", "b"]);
        assert!(times["a"] >= a && times["b"] >= b, "{times:?} of {a:?} and {b:?}");
        assert!(!is_measuring());
    }

    #[test]
    fn an_error_ends_the_measurement() {
        assert!(measure(&Device::Cpu, || work("a", no)).is_err());
        assert!(!is_measuring());
        let (_, times) = measure(&Device::Cpu, || work("b", NOTHING)).unwrap();
        assert_eq!(times.len(), 1);
    }

    #[test]
    fn an_operation_that_failed_does_not_hide_the_next() {
        let (_, times) = measure(&Device::Cpu, || {
            assert!(work("a", no).is_err());
            work("b", NOTHING)
        })
        .unwrap();
        assert!(times.contains_key("b"), "{times:?}");
    }

    #[test]
    fn scopes_contain_what_runs_inside_of_them() {
        let (_, recording) = record(&Device::Cpu, Instant::now(), || {
            scope_of("layer", 3, || scope("attention", || work("a", NOTHING)))?;
            work("b", NOTHING)
        })
        .unwrap();
        let [layer, attention, a, b] = &recording.spans[..] else { panic!("{recording:?}") };
        assert_eq!((layer.name, layer.number, layer.parent), ("layer", Some(3), None));
        assert_eq!((attention.name, attention.parent), ("attention", Some(0)));
        assert_eq!((a.name, a.parent, a.kind), ("a", Some(1), SpanKind::Operation));
        assert_eq!((b.name, b.parent), ("b", None));
        assert!(layer.host.start <= attention.host.start && attention.host.start <= a.host.start);
        assert!(a.host.end <= attention.host.end && layer.host.end <= b.host.start);
    }

    #[test]
    fn an_error_closes_the_scopes_around_it() {
        let (_, recording) = record(&Device::Cpu, Instant::now(), || {
            assert!(scope("failed", || work("a", no)).is_err());
            work("b", NOTHING)
        })
        .unwrap();
        assert_eq!(recording.spans[2].parent, None, "{recording:?}");
    }

    #[test]
    fn the_threads_of_the_pool_show_their_share_of_an_operation() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let ((), recording) = pool
            .install(|| {
                let (from, mut to) = (zeros(&[1 << 22], DType::F32), zeros(&[1 << 22], DType::BF16));
                record(&Device::Cpu, Instant::now(), || crate::cast::forward(&from, &mut to))
            })
            .unwrap();
        let [cast] = &recording.spans[..] else { panic!("{recording:?}") };
        assert_eq!(recording.tasks.len(), 3);
        let tasks: Vec<_> = recording.tasks.iter().flatten().collect();
        assert!(!tasks.is_empty());
        for task in tasks {
            assert_eq!(task.name, cast.name);
            assert!(cast.host.start <= task.time.start && task.time.end <= cast.host.end, "{task:?} of {cast:?}");
        }
    }
}
