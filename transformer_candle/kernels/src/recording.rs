//! Work that is the same every time, kept by a card and replayed at the price of one call.

use std::collections::HashMap;
use std::fmt;

use crate::cuda::Graph;
use crate::{Device, Error, Result, timing};

/// Replays what it saw before, on a card; on a CPU it runs everything as it comes.
///
/// ```
/// use kernels::{Device, Recording};
///
/// let (mut recording, mut runs) = (Recording::default(), 0);
/// for _ in 0..3 {
///     recording.run(&Device::Cpu, 1, || {
///         runs += 1;
///         Ok::<(), kernels::Error>(())
///     })?;
/// }
/// assert_eq!(runs, 3);
/// # Ok::<(), kernels::Error>(())
/// ```
#[derive(Default)]
pub struct Recording {
    graphs: HashMap<u64, Option<Graph>>,
    eager: bool,
}

impl fmt::Debug for Recording {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&u64> = self.graphs.keys().collect();
        formatter.debug_struct("Recording").field("keys", &keys).field("eager", &self.eager).finish()
    }
}

impl Recording {
    /// One that never records and runs everything as it comes, on a card too.
    pub fn eager() -> Self {
        Self { eager: true, ..Self::default() }
    }

    /// Runs `body` the first time it sees `key`, which loads kernels and chooses algorithms; records it the second time and replays
    /// that; from then on replays it without running `body`.
    ///
    /// One key stands for one sequence of operations on the same buffers with the same numbers: whatever changes from one replay to
    /// the next lies in buffers. The recording keeps its buffers' memory alive. While times are measured
    /// ([`timing::measure`]) it runs `body`.
    ///
    /// `body` asks for operations on this thread only, and neither allocates nor copies from or to the host. No other thread may
    /// drop the last owner of a buffer of this card while `body` is recorded: that would become part of the recording.
    ///
    /// # Errors
    /// The body's, or the driver's. After an error the key is as if it had never been seen.
    pub fn run<E: From<Error>>(
        &mut self,
        device: &Device,
        key: u64,
        mut body: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(cuda) = device.as_cuda().filter(|_| !self.eager && !timing::is_measuring()) else {
            return body();
        };
        // Taken out, and put back only when all went well.
        match self.graphs.remove(&key) {
            None => {
                body()?;
                self.graphs.insert(key, None);
            }
            Some(recorded) => {
                let mut graph = match recorded {
                    Some(graph) => graph,
                    None => cuda.record(body)?,
                };
                graph.launch()?;
                self.graphs.insert(key, Some(graph));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_cpu_the_body_runs_every_time_and_its_error_comes_out() {
        for mut recording in [Recording::default(), Recording::eager()] {
            let mut runs = 0;
            for turn in 0..4 {
                let outcome = recording.run(&Device::Cpu, 7, || {
                    runs += 1;
                    if turn == 2 {
                        return Err(Error::Invalid { operation: "test", problem: "no".to_owned() });
                    }
                    Ok(())
                });
                assert_eq!(outcome.is_err(), turn == 2);
            }
            assert_eq!(runs, 4);
        }
    }
}
