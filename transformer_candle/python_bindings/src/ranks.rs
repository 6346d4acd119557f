//! Ranks of a run that Python connects: the trainer's memory as arrays, and a trainer that exchanges through a Python
//! object.

use std::ffi::OsString;
use std::iter::once;
use std::sync::Arc;

use kernels::{Buffer, DType, Device};
use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use training::commands::train;
use training::ranks::{Exchange, Parcel, RankInfo, Ranks};
use training::stop::StopSignal;
use training::{Result, TrainerError};

use crate::commands::exit_code;

/// A buffer of the trainer, as `NumPy`'s array interface describes it if it is in this machine's memory, and as CUDA's
/// array interface does on a GPU: `numpy.asarray` or `torch.as_tensor` shares the memory. Of bf16 these are the bits, as
/// uint16.
#[pyclass(frozen, module = "orchestrator._native")]
pub struct Memory(Buffer);

#[pymethods]
impl Memory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.0.device() {
            Device::Cpu => self.interface(py),
            Device::Cuda(_) => Err(PyAttributeError::new_err("this buffer is on a GPU: see __cuda_array_interface__")),
        }
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Some(gpu) = self.0.device().as_cuda() else {
            return Err(PyAttributeError::new_err("this buffer is in the machine's memory: see __array_interface__"));
        };
        let interface = self.interface(py)?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", gpu.stream_handle())?;
        Ok(interface)
    }
}

impl Memory {
    /// Returns the entries that both array interfaces share; both are at version 3.
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let kind = match self.0.dtype() {
            DType::F32 => "<f4",
            DType::BF16 => "<u2",
            DType::I16 => "<i2",
            DType::I32 => "<i4",
            _ => "<u4",
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", kind)?;
        interface.set_item("shape", PyTuple::new(py, self.0.shape())?)?;
        interface.set_item("data", (self.0.address(), false))?;
        Ok(interface)
    }
}

/// An [`Exchange`] that calls the methods of a Python object.
#[derive(Debug)]
struct PythonExchange {
    object: Py<PyAny>,
    rank_info: RankInfo,
}

impl PythonExchange {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let number = |name: &str| object.getattr(name)?.extract::<usize>();
        let (rank, world_size) = (number("rank")?, number("world_size")?);
        let (local_rank, local_world_size) = (number("local_rank")?, number("local_world_size")?);
        let rank_info = RankInfo { rank, world_size, local_rank, local_world_size };
        Ok(Self { object: object.clone().unbind(), rank_info })
    }

    /// Calls a method of the object. An exception becomes [`TrainerError::RankLost`]: its message says which rank is
    /// lost.
    fn call<T>(&self, method: &str, arguments: impl for<'py> PyCallArgs<'py>) -> Result<T>
    where
        T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>,
    {
        Python::attach(|py| {
            let result = self.object.bind(py).call_method1(method, arguments).and_then(|value| value.extract());
            result.map_err(|error| TrainerError::RankLost(error.value(py).to_string()))
        })
    }
}

fn memories(parcels: &[Parcel]) -> Vec<(usize, Memory)> {
    parcels.iter().map(|(rank, part)| (*rank, Memory(part.clone()))).collect()
}

impl Exchange for PythonExchange {
    fn rank_info(&self) -> RankInfo {
        self.rank_info
    }

    fn connect(&self, device: &Device) -> Result<()> {
        let Some(gpu) = device.as_cuda() else { return Ok(()) };
        let problem: Option<String> = self.call("connect_gpus", (gpu.ordinal(), gpu.stream_handle()))?;
        problem.map_or(Ok(()), |problem| Err(TrainerError::Request(problem)))
    }

    fn begin_swap(&self, outgoing: &[Parcel], incoming: &[Parcel]) -> Result<()> {
        self.call::<Option<bool>>("begin_swap", (memories(outgoing), memories(incoming))).map(drop)
    }

    fn end_swap(&self) -> Result<()> {
        self.call::<Option<bool>>("end_swap", ()).map(drop)
    }

    fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        let sums: Vec<f64> = self.call("sum", (numbers.to_vec(),))?;
        if sums.len() != numbers.len() {
            return Err(TrainerError::RankLost(format!("the ranks sum {} and {} numbers", numbers.len(), sums.len())));
        }
        numbers.copy_from_slice(&sums);
        Ok(())
    }

    fn gather(&self, text: &str) -> Result<Vec<String>> {
        self.call("gather", (text,))
    }
}

/// Train as one of several ranks, and return the exit code. `words` is the command line of `train` without its name;
/// `exchange` connects the ranks, as `orchestrator.distributed.exchange.TorchExchange` does.
#[pyfunction]
pub fn train_rank(py: Python<'_>, words: Vec<OsString>, exchange: &Bound<'_, PyAny>) -> PyResult<u8> {
    let ranks = Ranks::new(Arc::new(PythonExchange::new(exchange)?));
    let words = once(OsString::from("orchestrate")).chain(words);
    let stop = StopSignal::new();
    exit_code(py, &stop, || train::run_rank(words, ranks, &stop))
}
