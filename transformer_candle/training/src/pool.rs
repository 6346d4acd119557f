//! The threads that compute on a CPU, and how operations start there without delay.

use rayon::{ThreadPool, ThreadPoolBuilder};
use run_config::RunConfig;

use crate::error::{Result, TrainerError};

/// A pool of as many threads as `runtime.threads` says; else `RAYON_NUM_THREADS`, else one a core.
///
/// # Errors
/// [`TrainerError::Request`] where the system does not start them.
pub(crate) fn of(config: &RunConfig) -> Result<ThreadPool> {
    let threads = config.runtime.threads.unwrap_or(0);
    ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("trainer-{index}")).build().map_err(
        |error| TrainerError::Request(format!("cannot start the {threads} threads of runtime.threads: {error}")),
    )
}

/// Runs a body on a thread of the current rayon pool. From outside, each operation would hand its work to one of the pool's
/// threads and wait for it to wake up.
pub(crate) fn in_pool<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| body())
}
