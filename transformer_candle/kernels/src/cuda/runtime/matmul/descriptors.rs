//! The library's descriptions of a GEMM, each freed with its owner.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulAlgoCheck,
    cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as OperationAttribute,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulMatrixScale_t as ScaleMode, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
    cublasLtReductionScheme_t, cudaDataType_t,
};

use crate::cuda::matmul_algorithm::Algorithm;
use crate::cuda::matmul_shape::{ColumnMajor, ColumnMajorMatmul, Shape};
use crate::cuda::{Scales, WORKSPACE_BYTES};
use crate::fp8::ScaleBlock;

type Result<T, E = CublasError> = std::result::Result<T, E>;

/// The descriptors by which the library knows a GEMM without its addresses.
pub(super) struct Descriptors {
    pub(super) operation: Operation,
    pub(super) left: Layout,
    pub(super) right: Layout,
    pub(super) result: Layout,
}

pub(super) struct Operation(pub(super) cublasLtMatmulDesc_t);
pub(super) struct Layout(pub(super) cublasLtMatrixLayout_t);
struct Preference(cublasLtMatmulPreference_t);

// SAFETY: descriptors are plain memory of the library's, written while they are made and only read afterwards.
unsafe impl Send for Descriptors {}
// SAFETY: as above.
unsafe impl Sync for Descriptors {}

impl Descriptors {
    /// Those of a shape; `scales` are of its first GEMM, or None where only its algorithm is looked at.
    pub(super) fn new(shape: &Shape, scales: Option<Scales>) -> Result<Self> {
        let ColumnMajorMatmul { left, right, result } = shape.column_major();
        Ok(Self {
            operation: Operation::new(shape, scales)?,
            left: Layout::new(&left)?,
            right: Layout::new(&right)?,
            result: Layout::new(&result)?,
        })
    }

    /// The algorithms that the library's heuristic proposes, fastest first, at most `count`.
    pub(super) fn candidates(&self, library: cublasLtHandle_t, shape: &Shape, most: usize) -> Result<Vec<Algorithm>> {
        let preference = Preference::for_alignments(&shape.column_major())?;
        let mut found = vec![MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit(); most];
        let mut count: c_int = 0;
        // SAFETY: the handle, the descriptors and the preference are alive, and there is room for `most` results.
        unsafe {
            cublasLtMatmulAlgoGetHeuristic(
                library,
                self.operation.0,
                self.left.0,
                self.right.0,
                self.result.0,
                self.result.0,
                preference.0,
                most as c_int,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        }
        .result()?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        // SAFETY: the library wrote the first `count`.
        let found = found.into_iter().map(|candidate| unsafe { candidate.assume_init() });
        Ok(found.filter(|candidate| candidate.state.result().is_ok()).map(|candidate| candidate.algo.data).collect())
    }

    /// The workspace that an algorithm needs for this GEMM, an error if it does not compute it on this GPU.
    pub(super) fn workspace_bytes(&self, library: cublasLtHandle_t, algorithm: &Algorithm) -> Result<usize> {
        let algorithm = cublasLtMatmulAlgo_t { data: *algorithm };
        let mut answer = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: the handle and the descriptors are alive. The library takes any bytes for an algorithm and judges
        // them.
        let status = unsafe {
            cublasLtMatmulAlgoCheck(
                library,
                self.operation.0,
                self.left.0,
                self.right.0,
                self.result.0,
                self.result.0,
                &raw const algorithm,
                answer.as_mut_ptr(),
            )
        };
        status.result()?;
        // SAFETY: written, as the call succeeded.
        Ok(unsafe { answer.assume_init() }.workspaceSize)
    }
}

impl Operation {
    /// Describes sums in f32 of products that are exact in f32 for BF16 and F8E4M3 operands; F32 operands are not rounded
    /// to TF32, which is another compute type. The addresses of scales are part of it.
    pub(super) fn new(shape: &Shape, scales: Option<Scales>) -> Result<Self> {
        let ColumnMajorMatmul { left, right, .. } = shape.column_major();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let operation = Self(result::create_matmul_desc(compute, scale)?);
        // CUBLAS_OP_N and CUBLAS_OP_T.
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(left.transposed))?;
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(right.transposed))?;
        let Some(block) = shape.scales else { return Ok(operation) };
        let mode = scale_mode(block);
        // One scale is the mode of a new descriptor, and the only one before version 12.8.
        if mode != ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F {
            operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &(mode as i32))?;
            operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &(mode as i32))?;
        }
        // As the operands, they change places (`Shape::column_major`).
        let [a, b] = scales.map_or([UNREAD_ADDRESS; 2], |scales| [scales.a, scales.b]);
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b)?;
        operation.set(OperationAttribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a)?;
        Ok(operation)
    }

    /// `T` is the type that the library documents for the attribute.
    fn set<T: Copy>(&self, attribute: OperationAttribute, value: &T) -> Result<()> {
        // SAFETY: the descriptor is alive, and the value is read during the call.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

/// An aligned address for what is described and not computed: without one, the library may not know a GEMM as scaled.
const UNREAD_ADDRESS: usize = 256;

/// How the library is told which elements share a scale.
fn scale_mode(block: ScaleBlock) -> ScaleMode {
    match block {
        ScaleBlock::Tensor => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        ScaleBlock::Square128 => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        ScaleBlock::Square32 => ScaleMode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
    }
}

impl Layout {
    fn new(matrix: &ColumnMajor) -> Result<Self> {
        use cublasLtMatrixLayoutAttribute_t as Attribute;
        let ColumnMajor { dtype, rows, columns, leading, batch, .. } = *matrix;
        let dtype = match dtype {
            DType::F8E4M3 => cudaDataType_t::CUDA_R_8F_E4M3,
            DType::BF16 => cudaDataType_t::CUDA_R_16BF,
            _ => cudaDataType_t::CUDA_R_32F,
        };
        let layout = Self(result::create_matrix_layout(dtype, rows as u64, columns as u64, leading as i64)?);
        if batch != 1 {
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(batch as i32))?;
            let elements = (leading * columns) as i64;
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &elements)?;
        }
        Ok(layout)
    }

    /// `T` is the type that the library documents for the attribute.
    fn set<T: Copy>(&self, attribute: cublasLtMatrixLayoutAttribute_t, value: &T) -> Result<()> {
        // SAFETY: the layout is alive, and the value is read during the call.
        unsafe { result::set_matrix_layout_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

impl Preference {
    /// Limits which algorithms may be offered. A sum over k that is split among blocks may be put together in F32 in
    /// the workspace, in a step of its own; not in the output in place, whose order is left to counters, nor in the
    /// output's type, which would round partial sums to BF16.
    fn for_alignments(matmul: &ColumnMajorMatmul) -> Result<Self> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref()?);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        let reductions = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &matmul.left.alignment)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &matmul.right.alignment)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &matmul.result.alignment)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &matmul.result.alignment)?;
        Ok(preference)
    }

    /// `T` is the type that the library documents for the attribute.
    fn set<T: Copy>(&self, attribute: cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the preference is alive, and the value is read during the call.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_desc` and destroyed here only.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `create_matrix_layout` and destroyed here only.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_pref` and destroyed here only.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
