//! Measures the matmul speed of this machine's CPU.

use std::time::{Duration, Instant};

use kernels::{Buffer, DType, Device, DeviceKind, linear};
use model::dtype_of;
use run_config::RunConfig;

use crate::{error::Result, pool};

/// M, N and K of the matmul: three matrices that fit in cache.
const SIZE: usize = 768;
/// How long the matmul is repeated, at least twice.
const MEASURE_TIME: Duration = Duration::from_millis(30);

/// The matmul speed of a run's threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CpuSpeed {
    pub(crate) threads: usize,
    /// FLOPs per second of matmuls in the run's precision.
    pub(crate) flops: f64,
}

impl CpuSpeed {
    /// Measures the fastest of a few matmuls.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub(super) fn measure(config: &RunConfig) -> Result<Self> {
        let pool = pool::from_config(config)?;
        let fastest = pool.install(|| fastest_matmul(dtype_of(config.runtime.precision)))?;
        let flops = 2.0 * (SIZE * SIZE * SIZE) as f64 / fastest.as_secs_f64();
        Ok(Self { threads: pool.current_num_threads(), flops })
    }
}

fn fastest_matmul(dtype: DType) -> kernels::Result<Duration> {
    let zeros = |elements: &[usize], dtype| Buffer::zeros(elements, dtype, &Device::Cpu);
    let (x, w, mut y) = (zeros(&[SIZE; 2], dtype)?, zeros(&[SIZE; 2], dtype)?, zeros(&[SIZE; 2], dtype)?);
    let mut workspace = zeros(&[linear::workspace_elements(SIZE, SIZE, SIZE, DeviceKind::Cpu)], DType::F32)?;
    fastest(2, MEASURE_TIME, || linear::forward(&x, &w, &mut y, &mut workspace))
}

/// Repeats a call at least so often and so long, and returns the shortest time that it took.
pub(super) fn fastest(
    fewest: usize,
    length: Duration,
    mut call: impl FnMut() -> kernels::Result<()>,
) -> kernels::Result<Duration> {
    let (begin, mut shortest, mut calls) = (Instant::now(), Duration::MAX, 0);
    while calls < fewest || begin.elapsed() < length {
        let from = Instant::now();
        call()?;
        shortest = shortest.min(from.elapsed());
        calls += 1;
    }
    Ok(shortest)
}
