//! The CPU's thread pools. A step runs on a thread of its pool, so that no operation has to be passed to one.

use std::env;
use std::error::Error;
use std::io;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};
use run_config::RunConfig;

use crate::address_space;
use crate::error::{Result, TrainerError};

/// The most threads per core. More threads than cores only wait for each other: an operation ends with its slowest
/// thread.
const MOST_PER_CORE: usize = 8;
/// Threads allowed on any machine, so that a run of a larger machine can be reproduced on a small one.
const ALWAYS_ALLOWED: usize = 64;
/// Thread pools of `threads` threads: ours, and those of the two libraries that encode text.
const POOLS: usize = 3;
/// The largest `data.num_workers`.
const MOST_WORKERS: usize = 256;
/// Threads that wait for data, signals and the Hub.
const SINGLE_THREADS: usize = 8;

/// Refuses far more threads than this machine has cores, and a system that cannot start them: the libraries that start
/// some of them would panic.
///
/// # Errors
/// [`TrainerError::Request`] names the setting that asks for too many threads, or says that the system cannot start them.
pub fn check(configured: Option<usize>, workers: usize) -> Result<()> {
    let threads = Threads::wanted(configured)?;
    address_space::share_what_is_limited();
    let thread_count = POOLS * threads.number + workers.min(MOST_WORKERS) + SINGLE_THREADS;
    start_and_end(thread_count).map_err(|error| threads.not_started(thread_count, &error.to_string()))
}

/// Starts `number` threads, all before the first one ends, and ends them.
fn start_and_end(number: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..number {
            thread::Builder::new().spawn_scoped(scope, || drop(gate.lock()))?;
        }
        drop(closed);
        Ok(())
    })
}

/// Returns the number of threads of [`from_config`].
///
/// # Errors
/// [`TrainerError::Request`] for far more threads than cores.
pub(crate) fn threads(config: &RunConfig) -> Result<usize> {
    Ok(Threads::wanted(config.runtime.threads)?.number)
}

/// Returns a pool of `runtime.threads` threads; without it `RAYON_NUM_THREADS`, else one per core.
///
/// # Errors
/// [`TrainerError::Request`] for far more threads than cores, and where the system does not start them.
pub(crate) fn from_config(config: &RunConfig) -> Result<ThreadPool> {
    let threads = Threads::wanted(config.runtime.threads)?;
    let builder = ThreadPoolBuilder::new().num_threads(threads.number);
    builder.thread_name(|index| format!("trainer-{index}")).build().map_err(|error| threads.refused(&error))
}

/// Starts the threads of [`in_pool`] outside of a trainer, once per process.
///
/// # Errors
/// Those of [`from_config`].
pub(crate) fn start() -> Result<()> {
    static STARTED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    check(None, 0)?;
    let threads = Threads::wanted(None)?;
    let outcome = STARTED.get_or_init(|| match ThreadPoolBuilder::new().num_threads(threads.number).build_global() {
        Err(error) if error.source().is_some() => Err(threads.refused(&error).to_string()),
        // An error without a source means that they have been started already.
        _ => Ok(()),
    });
    outcome.clone().map_err(TrainerError::Request)
}

/// Runs a body on a thread of the current rayon pool. From outside the pool, each operation would wait for
/// one of its threads to wake up.
pub(crate) fn in_pool<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| body())
}

/// The number of threads, and the setting it comes from.
struct Threads {
    number: usize,
    origin: &'static str,
}

impl Threads {
    fn wanted(configured: Option<usize>) -> Result<Self> {
        let variable = || env::var("RAYON_NUM_THREADS").ok()?.parse().ok().filter(|&number| number > 0);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (number, origin) = match (configured, variable()) {
            (Some(number), _) => (number, "runtime.threads"),
            (None, Some(number)) => (number, "RAYON_NUM_THREADS"),
            (None, None) => (cores, "one per core"),
        };
        Self { number, origin }.checked(cores)
    }

    fn checked(self, cores: usize) -> Result<Self> {
        let most = (cores * MOST_PER_CORE).max(ALWAYS_ALLOWED);
        if self.number <= most {
            return Ok(self);
        }
        let Self { number, origin } = self;
        Err(TrainerError::Request(format!(
            "{origin} asks for {number} threads, and this machine has {cores} cores: give at most {most}, best one per core"
        )))
    }

    fn refused(&self, error: &impl Error) -> TrainerError {
        let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        self.not_started(self.number, &cause)
    }

    fn not_started(&self, number: usize, cause: &str) -> TrainerError {
        let Self { number: computing, origin } = self;
        TrainerError::Request(format!(
            "the system does not start {number} threads, {computing} of them to compute ({origin}): {cause}. Raise its limits \
             (ulimit -u and -v, or the container's), or lower runtime.threads"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_more_threads_than_cores_are_refused() {
        let checked = |number, cores| Threads { number, origin: "runtime.threads" }.checked(cores);
        assert_eq!(checked(64, 2).unwrap().number, 64);
        assert_eq!(checked(1024, 128).unwrap().number, 1024);
        let error = checked(4096, 128).map(|threads| threads.number).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().starts_with("runtime.threads asks for 4096 threads"), "{error}");
        assert!(checked(65, 2).is_err());
    }
}
