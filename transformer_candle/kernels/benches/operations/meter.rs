//! Times operations and prints their rows.

use std::time::{Duration, Instant};

use kernels::cases::Case;
use kernels::{DType, Device, Result};
use serde::Serialize;

use crate::machine::Machine;
use crate::print;

/// Minimum number of calls per row.
const CALLS: usize = 3;

/// Measures operations on elements of one type.
pub struct Meter<'a> {
    pub machine: &'a Machine,
    pub dtype: DType,
    pub seconds: f64,
}

#[derive(Serialize)]
struct Row<'a> {
    operation: &'a str,
    dtype: &'a str,
    milliseconds: f64,
    best_milliseconds: f64,
    /// Calls in a training step; 0 for what is part of another row, or of no step.
    per_step: usize,
    flops: usize,
    bytes: usize,
    /// Milliseconds that the bytes take at the machine's bandwidth: from main memory, and from the cache that holds as
    /// many.
    memory_milliseconds: f64,
    cache_milliseconds: f64,
    /// GFLOP/s where the processor's peak bounds the operation, GB/s where its memory does.
    rate: f64,
    unit: &'a str,
    /// Fraction of the bound that was reached: the time at that bound over the time taken.
    of_peak: f64,
}

impl Meter<'_> {
    /// Times cases, one after the other, and prints their row.
    pub fn row(&self, operation: &str, per_step: usize, cases: &[Case]) -> Result<()> {
        let arguments = cases.iter().map(|case| case.allocate(&Device::Cpu, false)).collect::<Result<Vec<_>>>();
        let mut calls: Vec<_> = cases.iter().zip(arguments?).collect();
        let times = self.times(&mut || calls.iter_mut().try_for_each(|(case, arguments)| case.run(arguments)))?;
        let (median, best) = (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64());
        // The minimum work: every argument read or written once, and the matmuls' FLOPs.
        let flops: usize = cases.iter().map(|case| case.flops).sum();
        let bytes: usize = cases.iter().map(Case::bytes_moved).sum();
        let compute = flops as f64 / self.machine.flops(self.dtype);
        let (memory, cache) = (bytes as f64 / self.machine.memory(), bytes as f64 / self.machine.cache(bytes));
        let (amount, unit, bound) = if compute > cache { (flops, "GFLOP/s", compute) } else { (bytes, "GB/s", cache) };
        let row = Row {
            operation,
            dtype: self.dtype.as_str(),
            milliseconds: median * 1e3,
            best_milliseconds: best * 1e3,
            per_step,
            flops,
            bytes,
            memory_milliseconds: memory * 1e3,
            cache_milliseconds: cache * 1e3,
            rate: amount as f64 / median / 1e9,
            unit,
            of_peak: bound / median,
        };
        print(&row);
        Ok(())
    }

    /// The times of the calls, in ascending order; the first call warms up.
    fn times(&self, call: &mut impl FnMut() -> Result<()>) -> Result<Vec<Duration>> {
        call()?;
        let mut times = Vec::new();
        let begin = Instant::now();
        while times.len() < CALLS || begin.elapsed().as_secs_f64() < self.seconds {
            let from = Instant::now();
            call()?;
            times.push(from.elapsed());
        }
        times.sort_unstable();
        Ok(times)
    }
}
