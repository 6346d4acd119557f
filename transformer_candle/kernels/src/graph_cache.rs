//! CUDA graphs: a sequence of launches captured once and replayed with one call.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

use crate::cuda::Graph;
use crate::{Device, Error, Result, timing};

/// Captures and replays one CUDA graph per key on a GPU. On a CPU every call runs its body.
///
/// ```
/// use kernels::{Device, GraphCache};
///
/// let (mut graphs, mut runs) = (GraphCache::default(), 0);
/// for _ in 0..3 {
///     graphs.run(&Device::Cpu, 1, || {
///         runs += 1;
///         Ok::<(), kernels::Error>(())
///     })?;
/// }
/// assert_eq!(runs, 3);
/// # Ok::<(), kernels::Error>(())
/// ```
pub struct GraphCache<K> {
    graphs: HashMap<K, Option<Graph>>,
    eager: bool,
}

impl<K> Default for GraphCache<K> {
    fn default() -> Self {
        Self { graphs: HashMap::new(), eager: false }
    }
}

impl<K: fmt::Debug> fmt::Debug for GraphCache<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&K> = self.graphs.keys().collect();
        formatter.debug_struct("GraphCache").field("keys", &keys).field("eager", &self.eager).finish()
    }
}

impl<K: Eq + Hash> GraphCache<K> {
    /// A cache that never captures: every call runs its body, on a GPU too.
    pub fn eager() -> Self {
        Self { eager: true, ..Self::default() }
    }

    /// Runs `body` at the first call with `key`, which loads kernels and selects GEMM algorithms; at the second
    /// captures it as a graph and replays that; from the third replays the graph without calling `body`.
    ///
    /// A key identifies one sequence of operations on the same buffers with the same scalar arguments; what changes
    /// between replays has to be in buffers. A captured graph keeps its buffers' memory alive. During
    /// [`timing::measure`] nothing is captured or replayed.
    ///
    /// While it is captured, `body` must launch from this thread only, allocate nothing and copy nothing between host
    /// and GPU, and no other thread may free the last handle of a buffer of this GPU: the free would be captured as
    /// well.
    ///
    /// # Errors
    /// Errors of `body` and of the driver. After an error the key counts as unseen.
    pub fn run<E: From<Error>>(
        &mut self,
        device: &Device,
        key: K,
        mut body: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(cuda) = device.as_cuda().filter(|_| !self.eager && !timing::is_measuring()) else {
            return body();
        };
        // Removed first and inserted again on success, so that a failed key counts as unseen.
        match self.graphs.remove(&key) {
            None => {
                body()?;
                self.graphs.insert(key, None);
            }
            Some(captured) => {
                let mut graph = match captured {
                    Some(graph) => graph,
                    None => cuda.capture(body)?,
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
        for mut graphs in [GraphCache::default(), GraphCache::eager()] {
            let mut runs = 0;
            for turn in 0..4 {
                let outcome = graphs.run(&Device::Cpu, 7, || {
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
