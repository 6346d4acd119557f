//! Computes a GEMM with the algorithm chosen for its shape, and keeps and recalls choices.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::cublaslt::result::CublasError;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};

use super::super::Cuda;
use super::super::failure::Context as _;
use super::Choice;
use super::descriptors::{Descriptors, Operation};
use crate::cuda::matmul_algorithm::{self, Algorithm};
use crate::cuda::matmul_shape::Shape;
use crate::cuda::{Matmul, WORKSPACE_BYTES};
use crate::{Error, Result, WriteMode};

impl Cuda {
    /// Computes a GEMM on the stream. The first of its shape waits for the GPU, while the library's algorithms are
    /// timed.
    pub(crate) fn multiply(&self, matmul: &Matmul) -> Result<()> {
        matmul.check()?;
        let shape = Shape::new(matmul);
        if shape.batch == 0 || shape.sizes.contains(&0) {
            return self.multiply_empty(matmul);
        }
        self.enter()?;
        let choice = self.choice(shape, matmul)?;
        self.launch_matmul(matmul, &choice.descriptors, &choice.algorithm, matmul.scale)
            .during(self.ordinal(), format_args!("cublasLtMatmul for {shape}"))
    }

    /// The results of timing so far: the algorithm of each GEMM shape and the variant of each launch that has several,
    /// as opaque strings for [`Cuda::recall_choices`].
    pub fn choices(&self) -> BTreeMap<String, String> {
        let origin = self.matmul_origin();
        let text = |(shape, choice): (&Shape, &Arc<Choice>)| {
            (shape.to_string(), matmul_algorithm::write(&choice.algorithm, &origin))
        };
        let mut choices = self.variant_choices();
        choices.extend(self.0.matmul_algorithms.locked().iter().filter(|(_, choice)| choice.is_searched).map(text));
        choices
    }

    /// Restores another run's choices, so that this one computes the same bits. To be called before the first step:
    /// a captured graph keeps its choices.
    ///
    /// Returns the shapes and launches whose choice this GPU, this version of the library or this program does not
    /// have; they are timed again.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the GPU cannot be used at all.
    pub fn recall_choices(&self, choices: &BTreeMap<String, String>) -> Result<Vec<String>> {
        self.enter()?;
        let origin = self.matmul_origin();
        let mut refused = Vec::new();
        for (name, text) in choices {
            let recalled = name.parse::<Shape>().ok().zip(matmul_algorithm::read(text, &origin));
            let checked = recalled.and_then(|(shape, algorithm)| Some((shape, self.checked(&shape, algorithm).ok()?)));
            if let Some((shape, choice)) = checked {
                self.0.matmul_algorithms.keep(shape, choice);
            } else if !self.recall_variant(name, text) {
                refused.push(name.clone());
            }
        }
        Ok(refused)
    }

    /// The GPU and the library version that a stored algorithm is valid for.
    fn matmul_origin(&self) -> String {
        // SAFETY: takes nothing and returns a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        format!("{}, cuBLASLt {version}", self.name())
    }

    /// Turns another run's algorithm into a choice, if the library still supports it for this shape.
    fn checked(&self, shape: &Shape, algorithm: Algorithm) -> Result<Choice, CublasError> {
        let descriptors = Descriptors::new(shape, None)?;
        if descriptors.workspace_bytes(self.library(), &algorithm)? > WORKSPACE_BYTES {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
        Ok(Choice { descriptors, algorithm, is_searched: true })
    }

    pub(super) fn choice(&self, shape: Shape, matmul: &Matmul) -> Result<Arc<Choice>> {
        if let Some(choice) = self.0.matmul_algorithms.locked().get(&shape).cloned() {
            return Ok(choice);
        }
        if self.is_capturing() {
            let (ordinal, call) = (self.ordinal(), format!("capturing {shape}"));
            let reason =
                "no algorithm has been chosen for it, and none can be timed during capture: run it once before"
                    .to_owned();
            return Err(Error::Cuda { ordinal, call, reason });
        }
        let choice = self.search(&shape, matmul)?;
        Ok(self.0.matmul_algorithms.keep(shape, choice))
    }

    /// Computes a GEMM of empty matrices, which the library refuses. A sum over no elements is zero.
    fn multiply_empty(&self, matmul: &Matmul) -> Result<()> {
        let Matmul { m, n, batch, c, write_mode, .. } = *matmul;
        let rows = if write_mode == WriteMode::Accumulate || n == 0 { 0 } else { batch * m };
        (0..rows).try_for_each(|row| self.zero(c.skip_rows(row).address, n * c.dtype.size_in_bytes()))
    }

    /// Launches `c = scale a b` or `c += scale a b` on the stream.
    pub(super) fn launch_matmul(
        &self,
        matmul: &Matmul,
        descriptors: &Descriptors,
        algorithm: &Algorithm,
        scale: f32,
    ) -> Result<(), CublasError> {
        let Matmul { a, b, c, write_mode, workspace, .. } = matmul;
        let keep = match write_mode {
            WriteMode::Overwrite => 0f32,
            WriteMode::Accumulate => 1f32,
        };
        let pointer = |address: usize| ptr::without_provenance_mut::<c_void>(address);
        let algorithm = sys::cublasLtMatmulAlgo_t { data: *algorithm };
        let Descriptors { operation, left, right, result: output } = descriptors;
        // The addresses of scales are part of the description.
        let scaled = matmul.scales.map(|scales| Operation::new(&Shape::new(matmul), Some(scales))).transpose()?;
        let operation = scaled.as_ref().unwrap_or(operation);
        // SAFETY: `Matmul::check` found the three matrices inside of their buffers and the workspace as large as the
        // algorithm may need; the operation that asked keeps the buffers alive, and memory is freed in the stream's
        // order. The descriptors say how they lie (`Shape::column_major`) and outlive the call. Scales are read during
        // the call.
        unsafe {
            result::matmul(
                self.library(),
                operation.0,
                ptr::from_ref(&scale).cast(),
                ptr::from_ref(&keep).cast(),
                pointer(b.address),
                left.0,
                pointer(a.address),
                right.0,
                pointer(c.address),
                output.0,
                pointer(c.address),
                output.0,
                &raw const algorithm,
                pointer(workspace.address),
                WORKSPACE_BYTES,
                self.stream().cu_stream().cast(),
            )
        }
    }
}
