//! What was asked of the stream once, kept by the driver to be asked again as a whole.

use std::collections::HashMap;
use std::sync::PoisonError;

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::Cuda;
use super::failure::Context as _;
use crate::{Error, Result};

/// A recording that can be replayed.
pub(crate) struct Graph {
    recorded: CudaGraph,
    cuda: Cuda,
    /// Every tensor that the recorded launches read or write, by storage: the graph holds bare addresses.
    _tensors: HashMap<usize, Tensor>,
}

// SAFETY: the driver's graphs may go from thread to thread, but must not be used by two at once; `launch` takes `&mut self`, and
// nothing else touches the graph but `drop`.
unsafe impl Send for Graph {}

impl Cuda {
    /// Records what `body` asks of the stream, without doing it. The calling thread alone has the GPU meanwhile.
    ///
    /// # Errors
    /// The body's, or the driver's. The stream then is as it was, and nothing is kept.
    pub(crate) fn capture<E: From<Error>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let ordinal = self.ordinal();
        // Taken before asking: whoever records then is this thread.
        let _turn = self.take_turn();
        if self.is_capturing() {
            let call = "capturing a graph".to_owned();
            return Err(Error::Cuda { ordinal, call, reason: "another one is being recorded".to_owned() }.into());
        }
        let capture = Capture::begin(self)?;
        let outcome = body();
        let (ended, tensors) = capture.end();
        outcome?;
        let nothing =
            || Error::Cuda { ordinal, call: "cuStreamEndCapture".to_owned(), reason: "it gave no graph".to_owned() };
        let graph = ended?.ok_or_else(nothing)?;
        Ok(Graph { recorded: graph, cuda: self.clone(), _tensors: tensors })
    }

    /// Keeps an operation's tensors alive as long as the graph that is being recorded, if one is.
    pub(crate) fn hold<'a>(&self, tensors: impl Iterator<Item = (usize, &'a Tensor)>) {
        if let Some(kept) = &mut *self.recorded() {
            for (storage, tensor) in tensors {
                kept.entry(storage).or_insert_with(|| tensor.clone());
            }
        }
    }

    /// Whether what is asked of the stream is being recorded instead of done: nothing may wait, nothing be tried out.
    pub(crate) fn is_capturing(&self) -> bool {
        self.recorded().is_some()
    }

    fn recorded(&self) -> std::sync::MutexGuard<'_, Option<HashMap<usize, Tensor>>> {
        // Whoever panicked while holding it left a whole map: nothing but insertions happens inside.
        self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Graph {
    /// Asks the stream for everything recorded.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let _turn = self.cuda.take_turn();
        self.recorded.launch().during(self.cuda.ordinal(), "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.cuda.enter_to_free();
    }
}

/// A stream that records. Ends when dropped, so that a body that panics leaves the stream usable.
struct Capture<'a> {
    cuda: &'a Cuda,
}

impl<'a> Capture<'a> {
    fn begin(cuda: &'a Cuda) -> Result<Self> {
        // What this thread must not do meanwhile (allocate, wait) the driver then refuses to it, and lets other threads do: one asks for
        // the memory in use, say. They cannot reach this stream, the turn is taken.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda.stream().begin_capture(mode).during(cuda.ordinal(), "cuStreamBeginCapture")?;
        *cuda.recorded() = Some(HashMap::new());
        Ok(Self { cuda })
    }

    /// The graph, and the tensors that its launches touch.
    fn end(self) -> (Result<Option<CudaGraph>>, HashMap<usize, Tensor>) {
        self.stop()
    }

    fn stop(&self) -> (Result<Option<CudaGraph>>, HashMap<usize, Tensor>) {
        let Some(tensors) = self.cuda.recorded().take() else { return (Ok(None), HashMap::new()) };
        let graph = self.cuda.stream().end_capture(CUgraphInstantiate_flags(0));
        (graph.during(self.cuda.ordinal(), "cuStreamEndCapture"), tensors)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // Nothing is left to stop unless the body panicked, and then nobody to tell of a failure.
        let _ = self.stop();
    }
}
