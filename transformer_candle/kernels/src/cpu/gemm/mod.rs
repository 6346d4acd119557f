//! GEMM of f32 or bf16 operands, accumulated in f32: `out_MN = a_MK b_KN` or `out_MN += a_MK b_KN`.
//!
//! The loop nest is that of BLIS (Van Zee and van de Geijn, 2015), from the outside in:
//! ```text
//!         for rows of M that partial sums have room for     only if K has several blocks and `out` is bf16
//! loop 5    for NC columns of N
//! loop 4      for KC words of K: pack B (KC x NC)           all threads; 4 MiB, a part of the L3 cache, or 2
//! loop 3        for MC rows of M: pack A (MC x KC)          each thread its own; 256 or 512 KiB of the L2 cache
//! loop 2          for NR columns of the B block             one packed panel of B, KC x NR: 128 KiB, or four
//! loop 1            for MR rows of the A block              one packed panel of A, MR x KC: 56 KiB
//!                     micro-kernel: MR x NR accumulators in registers += MR words of A times NR words of B, KC times
//! ```
//! MR x NR is 14 x 32 with AVX-512. [`loops`] has the nest, [`pack`] packs, [`operand`] reads an operand in place where
//! packing would gain nothing, the micro-kernels are [`micro_kernel`] (f32), `avx512_kernel` (f32, for Intel's caches),
//! `bf16_kernel` (AVX-512 BF16) and `amx_kernel`, whose blocks differ, [`output`] writes a tile. [`Blocks`] has what
//! follows from the caches. One row times a matrix is a GEMV ([`gemv`]).
//!
//! Packed operands consist of 32-bit *words*: one f32, or for bf16 dot products two successive elements of K. Two bf16
//! operands are multiplied by the units that [`Bf16Units`] chooses for the processor, or widened to f32; an f32 operand
//! beside a bf16 one is rounded to bf16 only if the result is bf16 as well.
//!
//! Results depend on the operands and the CPU's instructions alone: an element of `out` is one sum over K in ascending
//! order, started anew for every block of K (a GEMV adds several such sums). Threads divide the tiles, never a sum.

#[cfg(target_arch = "x86_64")]
mod amx_kernel;
#[cfg(target_arch = "x86_64")]
mod avx512_kernel;
#[cfg(target_arch = "x86_64")]
mod bf16_kernel;
mod bf16_units;
mod blocks;
mod gemv;
mod loops;
mod matrix;
mod micro_kernel;
mod operand;
mod output;
mod pack;

use candle_core::DType;
#[cfg(target_arch = "x86_64")]
use pulp::x86::V4;
use pulp::{Arch, Simd, WithSimd};

pub use self::bf16_units::Bf16Units;
#[cfg(target_arch = "x86_64")]
use self::blocks::Blocks;
use self::loops::Gemm;
pub(crate) use self::loops::workspace_for;
pub(crate) use self::matrix::Matrix;
use self::micro_kernel::F32Kernel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::Amx;
use crate::{Element, WriteMode};

/// `out_MN = a_MK b_KN`. The rows of `out` lie `stride` elements apart.
pub(crate) fn multiply<A: Element, B: Element, O: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [O],
    stride: usize,
    workspace: &mut [f32],
) {
    if a.rows == 1 && !a.transposed && b.transposed {
        return gemv::multiply(a, b, out);
    }
    multiply_accumulate(a, b, out, stride, WriteMode::Overwrite, workspace);
}

/// `out_MN = a_MK b_KN` or `out_MN += a_MK b_KN`, with the fastest micro-kernel of this CPU. The rows of `out` lie
/// `stride` elements apart.
pub(crate) fn multiply_accumulate<A: Element, B: Element, O: Element>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    out: &mut [O],
    stride: usize,
    write_mode: WriteMode,
    workspace: &mut [f32],
) {
    assert_eq!(a.columns, b.rows);
    let gemm = Gemm { a, b, out, stride, write_mode, workspace };
    let in_bf16 = B::DTYPE == DType::BF16 && (A::DTYPE == DType::BF16 || O::DTYPE == DType::BF16);
    #[cfg(target_arch = "x86_64")]
    if in_bf16 {
        let units = Bf16Units::of_this_processor();
        if let Some(amx) = Amx::if_available().filter(|_| units == Bf16Units::Amx) {
            return gemm.multiply(amx_kernel::AmxKernel(amx));
        }
        if let Some(kernel) = bf16_kernel::Bf16Kernel::if_available().filter(|_| units == Bf16Units::Avx512) {
            return gemm.multiply(kernel);
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = V4::try_new().filter(|_| Blocks::of_this_processor() == Blocks::IN_L2) {
        return gemm.multiply(avx512_kernel::Avx512Kernel(simd));
    }
    Arch::new().dispatch(WidestF32(gemm));
}

/// A GEMM in f32, compiled for the widest vectors of this CPU.
struct WidestF32<'a, A, B, O>(Gemm<'a, A, B, O>);

impl<A: Element, B: Element, O: Element> WithSimd for WidestF32<'_, A, B, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 {
            self.0.multiply(F32Kernel::<S, 14, 2>(simd));
        } else {
            self.0.multiply(F32Kernel::<S, 6, 2>(simd));
        }
    }
}

#[cfg(test)]
mod tests;
