//! The operations on CPU slices. Work is split into chunks of fixed size, which the threads of the current rayon pool
//! share; the order of no sum depends on the number of threads.

pub(crate) mod accumulate;
pub(crate) mod adamw;
pub(crate) mod add_rms_norm;
pub(crate) mod amx;
pub(crate) mod attention;
pub(crate) mod bias;
pub(crate) mod cast;
pub(crate) mod column_sums;
pub(crate) mod disjoint;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod exp;
pub(crate) mod fp8;
pub(crate) mod gemm;
pub(crate) mod grad_norm;
pub(crate) mod head_cross_entropy;
pub(crate) mod muon;
pub(crate) mod partials;
pub(crate) mod qk_norm;
pub(crate) mod rope;
pub(crate) mod schedule;
pub(crate) mod simd;
pub(crate) mod swiglu;
mod transpose;
