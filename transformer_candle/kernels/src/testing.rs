//! Numbers, buffers, fixtures and comparisons that the operations' tests share.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use crate::cases::BufferContents;
use crate::{Buffer, Device, Element, bf16};

/// Numbers in -1..1 with a bell-like distribution, the same for the same seed. bf16 holds each exactly, so that an
/// operation's result in either type differs from the exact one by its own rounding only.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    (0..count).map(|_| f64::from(bf16::narrow((uniform() + uniform()) as f32).widen())).collect()
}

pub(crate) fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// A buffer of F32 or BF16 with these values.
pub(crate) fn buffer(values: &[f64], shape: &[usize], dtype: DType) -> Buffer {
    let mut buffer = Buffer::zeros(shape, dtype, &Device::Cpu).unwrap();
    match dtype {
        DType::BF16 => buffer.write(&to_f32(values).into_iter().map(bf16::narrow).collect::<Vec<_>>()).unwrap(),
        _ => buffer.write(&to_f32(values)).unwrap(),
    }
    buffer
}

/// A zeroed buffer.
pub(crate) fn zeros(shape: &[usize], dtype: DType) -> Buffer {
    Buffer::zeros(shape, dtype, &Device::Cpu).unwrap()
}

/// An F32 workspace filled with NaN: no operation may rely on its contents.
pub(crate) fn workspace(elements: usize) -> Buffer {
    buffer(&vec![f64::NAN; elements], &[elements], DType::F32)
}

/// A buffer of U32 ids or I32 targets.
pub(crate) fn integers<T: crate::Scalar>(values: &[T]) -> Buffer {
    let mut buffer = zeros(&[values.len()], T::DTYPE);
    buffer.write(values).unwrap();
    buffer
}

/// ‖ours - exact‖ / ‖exact‖.
pub(crate) fn relative_error(ours: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(ours.len(), exact.len());
    let difference: f64 = ours.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
    let size: f64 = exact.iter().map(|value| value * value).sum();
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}

/// Fails unless the buffer is as near to the exact values as its element type and a sum's rounding allow.
#[track_caller]
pub(crate) fn assert_near(buffer: &Buffer, exact: &[f64]) {
    let bound = if buffer.dtype() == DType::BF16 { 4e-3 } else { 1e-5 };
    assert_within(buffer, exact, bound);
}

/// Fails unless the relative error by norm is within a bound.
#[track_caller]
pub(crate) fn assert_within(buffer: &Buffer, exact: &[f64], bound: f64) {
    let error = relative_error(&buffer.read_f32().unwrap(), exact);
    assert!(error <= bound, "relative error {error:e} of {:?} {:?}", buffer.dtype(), buffer.shape());
}

/// d function / d argument in f64 by central differences.
pub(crate) fn finite_differences(function: impl Fn(&[f64]) -> f64, argument: &[f64]) -> Vec<f64> {
    let step = 1e-5;
    let mut moved = argument.to_vec();
    let mut slope = |index: usize| {
        moved[index] = argument[index] + step;
        let above = function(&moved);
        moved[index] = argument[index] - step;
        let below = function(&moved);
        moved[index] = argument[index];
        (above - below) / (2.0 * step)
    };
    (0..argument.len()).map(&mut slope).collect()
}

/// Fails unless two gradients in f64 agree as far as finite differences can tell.
#[track_caller]
pub(crate) fn assert_same_gradient(ours: &[f64], differences: &[f64]) {
    assert_eq!(ours.len(), differences.len());
    for (index, (ours, theirs)) in ours.iter().zip(differences).enumerate() {
        assert!((ours - theirs).abs() <= 1e-7 * (1.0 + theirs.abs()), "[{index}]: {ours} against {theirs}");
    }
}

/// The inner product: a scalar function of an output, whose gradient is `weights`.
pub(crate) fn dot(values: &[f64], weights: &[f64]) -> f64 {
    values.iter().zip(weights).map(|(a, b)| a * b).sum()
}

/// Runs a test's computation in pools of 1, 2 and 4 threads and fails unless the buffers it returns are bitwise the
/// same.
#[track_caller]
pub(crate) fn assert_same_at_any_thread_count(compute: impl Fn() -> Vec<Buffer> + Sync) {
    let run = |threads: usize| -> Vec<BufferContents> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| compute().iter().map(|buffer| BufferContents::read(buffer).unwrap()).collect())
    };
    let one = run(1);
    for threads in [2, 4] {
        assert!(run(threads) == one, "the result at {threads} threads is another one than at 1");
    }
}

/// A fixture of `tests/golden`, written by `PyTorch` in f64.
pub(crate) struct Golden(HashMap<String, Tensor>);

impl Golden {
    pub(crate) fn load(operation: &str) -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
        Self(
            candle_core::safetensors::load(format!("{folder}/{operation}.safetensors"), &candle_core::Device::Cpu)
                .unwrap(),
        )
    }

    pub(crate) fn shape(&self, name: &str) -> &[usize] {
        self.0[name].dims()
    }

    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        self.0[name].flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<i64> {
        self.0[name].flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The values in an F32 buffer of the same shape.
    pub(crate) fn buffer(&self, name: &str) -> Buffer {
        buffer(&self.values(name), self.shape(name), DType::F32)
    }
}
