//! Times operations by name: on a CPU with the clock, on a GPU with events in its stream.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::cuda::Event;
use crate::{Device, Result};

thread_local! {
    /// The times of this thread's `measure`; None outside of one.
    static MEASURED: RefCell<Option<Measured>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Measured {
    spans: Vec<(&'static str, Time)>,
    /// Whether an operation is running: operations that it calls count as part of it.
    inside: bool,
}

enum Time {
    Clock(Duration),
    Events(Event, Event),
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
    device.synchronize()?;
    let measuring = Measuring::begin();
    let result = body()?;
    device.synchronize()?;
    let mut times = BTreeMap::new();
    let spans = MEASURED.take().map(|measured| measured.spans).unwrap_or_default();
    drop(measuring);
    for (operation, time) in spans {
        let time = match time {
            Time::Clock(time) => time,
            Time::Events(from, to) => from.until(&to)?,
        };
        *times.entry(operation).or_default() += time;
    }
    Ok((result, times))
}

/// Whether this thread is inside of [`measure`].
pub(crate) fn is_measuring() -> bool {
    MEASURED.with_borrow(Option::is_some)
}

/// Runs an operation and adds its time if this thread is measuring.
pub(crate) fn operation<R>(name: &'static str, device: &Device, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let Some(inside) = Inside::enter() else { return body() };
    let result;
    let time = if let Some(cuda) = device.as_cuda() {
        let from = cuda.mark()?;
        result = body()?;
        Time::Events(from, cuda.mark()?)
    } else {
        let from = Instant::now();
        result = body()?;
        Time::Clock(from.elapsed())
    };
    drop(inside);
    MEASURED.with_borrow_mut(|measured| {
        if let Some(it) = measured {
            it.spans.push((name, time));
        }
    });
    Ok(result)
}

/// Guard of an operation being timed; dropped also on errors and panics.
struct Inside;

impl Inside {
    /// None outside of a measurement and inside of another operation.
    fn enter() -> Option<Self> {
        MEASURED.with_borrow_mut(|measured| {
            let measured = measured.as_mut().filter(|measured| !measured.inside)?;
            measured.inside = true;
            Some(Self)
        })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        MEASURED.with_borrow_mut(|measured| {
            if let Some(it) = measured {
                it.inside = false;
            }
        });
    }
}

/// Guard of this thread's measurement, which ends on drop, also after an error or a panic.
struct Measuring {
    outer: Option<Measured>,
}

impl Measuring {
    fn begin() -> Self {
        Self { outer: MEASURED.replace(Some(Measured::default())) }
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        MEASURED.set(self.outer.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Arguments;
    use crate::testing::*;
    use crate::{DType, Error};

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
}
