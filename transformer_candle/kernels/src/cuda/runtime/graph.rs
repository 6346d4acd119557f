//! CUDA graphs: captured from the compute stream, replayed with one launch.

use std::collections::HashMap;
use std::sync::PoisonError;

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::Cuda;
use super::failure::Context as _;
use crate::{Error, Result};

/// A captured graph.
pub(crate) struct Graph {
    captured: CudaGraph,
    cuda: Cuda,
    /// Every tensor that the captured launches use, by storage: the graph itself holds addresses only.
    _tensors: HashMap<usize, Tensor>,
}

// SAFETY: a graph may move between threads but not be used by two at once: `launch` takes `&mut self`, and only `drop`
// uses it besides.
unsafe impl Send for Graph {}

impl Cuda {
    /// Captures the launches of `body` without running them. The calling thread holds the stream lock meanwhile.
    ///
    /// # Errors
    /// Errors of `body` and of the driver. The stream then is unchanged, and no graph is kept.
    pub(crate) fn capture<E: From<Error>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let ordinal = self.ordinal();
        // Locked first: a capture in progress is then one of this thread.
        let _guard = self.lock_stream();
        if self.is_capturing() {
            let call = "capturing a graph".to_owned();
            return Err(Error::Cuda { ordinal, call, reason: "another one is being captured".to_owned() }.into());
        }
        let capture = Capture::begin(self)?;
        let outcome = body();
        let (ended, tensors) = capture.end();
        outcome?;
        let nothing =
            || Error::Cuda { ordinal, call: "cuStreamEndCapture".to_owned(), reason: "it gave no graph".to_owned() };
        let graph = ended?.ok_or_else(nothing)?;
        Ok(Graph { captured: graph, cuda: self.clone(), _tensors: tensors })
    }

    /// Keeps an operation's tensors alive as long as the graph that is being captured, if any.
    pub(crate) fn hold<'a>(&self, tensors: impl Iterator<Item = (usize, &'a Tensor)>) {
        if let Some(kept) = &mut *self.captured() {
            for (storage, tensor) in tensors {
                kept.entry(storage).or_insert_with(|| tensor.clone());
            }
        }
    }

    /// Whether launches are being captured instead of run: nothing may wait or be timed.
    pub(crate) fn is_capturing(&self) -> bool {
        self.captured().is_some()
    }

    fn captured(&self) -> std::sync::MutexGuard<'_, Option<HashMap<usize, Tensor>>> {
        // A thread that panicked while holding it left a valid map: it is only inserted into.
        self.0.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Graph {
    /// Launches the graph on the stream.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let _guard = self.cuda.lock_stream();
        self.captured.launch().during(self.cuda.ordinal(), "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.cuda.enter_to_free();
    }
}

/// A capture in progress. Dropping it ends the capture, so that the stream stays usable if the body panics.
struct Capture<'a> {
    cuda: &'a Cuda,
}

impl<'a> Capture<'a> {
    fn begin(cuda: &'a Cuda) -> Result<Self> {
        // The driver then refuses allocations and waits to this thread only; other threads may query the memory in use,
        // for example. They cannot use this stream, which is locked.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda.stream().begin_capture(mode).during(cuda.ordinal(), "cuStreamBeginCapture")?;
        *cuda.captured() = Some(HashMap::new());
        Ok(Self { cuda })
    }

    /// The graph, and the tensors that its launches use.
    fn end(self) -> (Result<Option<CudaGraph>>, HashMap<usize, Tensor>) {
        self.stop()
    }

    fn stop(&self) -> (Result<Option<CudaGraph>>, HashMap<usize, Tensor>) {
        let Some(tensors) = self.cuda.captured().take() else { return (Ok(None), HashMap::new()) };
        let graph = self.cuda.stream().end_capture(CUgraphInstantiate_flags(0));
        (graph.during(self.cuda.ordinal(), "cuStreamEndCapture"), tensors)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // In progress only if the body panicked; a failure then cannot be reported.
        let _ = self.stop();
    }
}
