//! Rotary position embedding (Su et al., "`RoFormer`", arXiv:2104.09864) of the query and key heads of packed QKV rows,
//! in place, in Hugging Face's "rotate half" convention: element j of a head is rotated together with element j + E/2.
//!
//! Legend: N tokens, T positions, H query heads, K key/value heads, E head size, E2 = E / 2, P = (H + 2K) * E.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::{Buffer, Device, Error, HeadLayout, Result, cpu};

/// The cosines and sines of every position's angles, F32, computed in f64 and rounded once.
#[derive(Clone, Debug)]
pub struct RopeTables {
    /// `cos(t * theta^(-2j / E))` at [t, j].
    pub cos_TE2: Buffer,
    /// `sin(t * theta^(-2j / E))` at [t, j].
    pub sin_TE2: Buffer,
}

/// The angle by which each pair of elements is turned from one position to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// The base: pair j of a head of E elements has the frequency `theta^(-2j / E)`.
    pub theta: f64,
    /// Scaling of the frequencies for a context that was extended after pre-training; None without it.
    pub scaling: Option<Llama3Scaling>,
}

/// The scaling of Llama 3.1 and later ("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.4.3): low frequencies
/// are divided by `factor`, high ones stay, and those in between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Low frequencies turn less than this often in the original context.
    pub low_freq_factor: f64,
    /// High frequencies turn more than this often.
    pub high_freq_factor: f64,
    /// Positions of the original context.
    pub original_context: f64,
}

impl Frequencies {
    /// The unscaled frequencies of a base.
    pub fn of_base(theta: f64) -> Self {
        Self { theta, scaling: None }
    }

    /// Radians per position of pair `j` in heads of `head_size` elements.
    pub fn radians(&self, j: usize, head_size: usize) -> f64 {
        let frequency = self.theta.powf(-2.0 * j as f64 / head_size as f64);
        let Some(Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context }) = self.scaling else {
            return frequency;
        };
        let turns = original_context * frequency / std::f64::consts::TAU;
        let ramp = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        frequency * (ramp + (1.0 - ramp) / factor)
    }
}

/// Computes the tables of positions `0..positions`.
pub fn tables(positions: usize, head_size: usize, frequencies: &Frequencies, device: &Device) -> Result<RopeTables> {
    let theta = frequencies.theta;
    if head_size == 0 || !head_size.is_multiple_of(2) || !theta.is_finite() || theta <= 0.0 {
        let problem = format!("needs an even head size and a positive theta, given {head_size} and {theta}");
        return Err(Error::Invalid { operation: "rope::tables", problem });
    }
    let half = head_size / 2;
    let table = |function: fn(f64) -> f64| -> Result<Buffer> {
        let turn = |t: usize, j: usize| function(t as f64 * frequencies.radians(j, head_size)) as f32;
        let values = (0..positions).flat_map(|t| (0..half).map(move |j| turn(t, j)));
        let mut table = Buffer::zeros(&[positions, half], DType::F32, device)?;
        table.write(&values.collect::<Vec<f32>>())?;
        Ok(table)
    };
    Ok(RopeTables { cos_TE2: table(f64::cos)?, sin_TE2: table(f64::sin)? })
}

/// Turns the query and key heads of every row by the angles of the row's position; values stay. F32 or BF16.
///
/// Row n is at position `first_position + n % sequence_length`: whole sequences start at 0, decoding starts later.
pub fn forward(
    qkv_NP: &mut Buffer,
    layout: &HeadLayout,
    tables: &RopeTables,
    sequence_length: usize,
    first_position: usize,
) -> Result<()> {
    rotate("rope::forward", qkv_NP, layout, tables, sequence_length, first_position, 1.0)
}

/// Turns the gradients of the rotated heads back, which makes them the gradients of the heads before [`forward`].
pub fn backward(
    dqkv_NP: &mut Buffer,
    layout: &HeadLayout,
    tables: &RopeTables,
    sequence_length: usize,
    first_position: usize,
) -> Result<()> {
    rotate("rope::backward", dqkv_NP, layout, tables, sequence_length, first_position, -1.0)
}

fn rotate(
    operation: &'static str,
    qkv_NP: &mut Buffer,
    layout: &HeadLayout,
    tables: &RopeTables,
    sequence_length: usize,
    first_position: usize,
    direction: f32,
) -> Result<()> {
    layout.check(operation)?;
    let dtype = qkv_NP.dtype();
    let size = |buffer: &Buffer| buffer.shape().first().copied().unwrap_or(0);
    let (rows, positions, half) = (size(qkv_NP), size(&tables.cos_TE2), layout.head_size / 2);
    let (last, table_rows) = (first_position.saturating_add(sequence_length), positions);
    let arguments = Arguments::new(operation)
        .output("qkv_NP", qkv_NP, dtype, &[rows, layout.packed_width()])
        .input("cos_TE2", &tables.cos_TE2, DType::F32, &[positions, half])
        .input("sin_TE2", &tables.sin_TE2, DType::F32, &[positions, half])
        .require(last <= table_rows, || format!("positions up to {last} are needed, the tables have {table_rows}"))
        .require(sequence_length > 0 && rows.is_multiple_of(sequence_length), || {
            format!("{rows} rows are not whole sequences of {sequence_length}")
        });
    let (qkv, angles) = (KernelArg::from(&*qkv_NP), [&tables.cos_TE2, &tables.sin_TE2].map(KernelArg::from));
    let rotation = cuda::rope::Rotation { rows, sequence_length, first_position, direction };
    let cpu = |access: &Access<'_>| {
        with_element!(operation, "qkv_NP", dtype, E => {
            let angles = cpu::rope::Angles {
                cos: &tables.cos_TE2.slice(access)[first_position * half..last * half],
                sin: &tables.sin_TE2.slice(access)[first_position * half..last * half],
                direction,
            };
            cpu::rope::rotate::<E>(qkv_NP.slice_mut(access), layout, &angles);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::rope::rotate(qkv, layout, angles, rotation))
}

/// The operation in the plainest terms, with the tables' angles computed where they are needed.
pub mod reference {
    use crate::{HeadLayout, Real};

    /// See [`super::forward`].
    pub fn forward<R: Real>(qkv_NP: &[R], layout: &HeadLayout, theta: f64, length: usize, first: usize) -> Vec<R> {
        rotate(qkv_NP, layout, theta, length, first, R::ONE)
    }

    /// See [`super::backward`].
    pub fn backward<R: Real>(dqkv_NP: &[R], layout: &HeadLayout, theta: f64, length: usize, first: usize) -> Vec<R> {
        rotate(dqkv_NP, layout, theta, length, first, -R::ONE)
    }

    fn rotate<R: Real>(rows: &[R], layout: &HeadLayout, theta: f64, length: usize, first: usize, sign: R) -> Vec<R> {
        let mut turned = rows.to_vec();
        for (n, row) in turned.chunks_exact_mut(layout.packed_width()).enumerate() {
            let position = (first + n % length) as f64;
            for head in row.chunks_exact_mut(layout.head_size).take(layout.heads + layout.kv_heads) {
                let (left, right) = head.split_at_mut(layout.head_size / 2);
                for j in 0..left.len() {
                    let angle = position * theta.powf(-2.0 * j as f64 / layout.head_size as f64);
                    let (cos, sin) = (R::from_f64(angle.cos()), sign * R::from_f64(angle.sin()));
                    (left[j], right[j]) = (left[j] * cos - right[j] * sin, right[j] * cos + left[j] * sin);
                }
            }
        }
        turned
    }
}

/// Calls for checks and benchmarks.
pub mod cases {
    use super::{Frequencies, RopeTables, backward, forward, tables};
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Positions, Size};
    use crate::{DType, Device, Result};

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for positions in size.positions() {
            cases.try_add(move |inputs| rotation(inputs, positions, true));
            cases.try_add(move |inputs| rotation(inputs, positions, false));
        }
    }

    /// [`forward`], or [`backward`], which turns the other way. Queries and keys alone are read and written.
    pub fn rotation(inputs: &mut Inputs, positions: Positions, turns_forward: bool) -> Result<Case> {
        let Positions { layout, batch, length, first } = positions;
        let (end, half) = (first + length, layout.head_size / 2);
        let (rows, angles) = ([positions.tokens(), layout.packed_width()], [end, half]);
        let RopeTables { cos_TE2: cos, sin_TE2: sin } =
            tables(end, layout.head_size, &Frequencies::of_base(10_000.0), &Device::Cpu)?;
        let (name, rotate) = if turns_forward {
            ("rope::forward", forward as fn(&mut _, &_, &_, _, _) -> _)
        } else {
            ("rope::backward", backward as fn(&mut _, &_, &_, _, _) -> _)
        };
        let turned = positions.tokens() * (layout.query_width() + layout.key_width());
        Ok(Case::new(inputs.name(name), format!("{batch} x {length} from {first}, {}", positions.heads()))
            .updated("qkv", &rows, inputs.numbers(&rows), inputs.bound())
            .input("cos", &angles, BufferContents::read(&cos)?)
            .input("sin", &angles, BufferContents::read(&sin)?)
            .bytes(2 * turned * inputs.dtype.size_in_bytes())
            .call(move |[qkv, cos, sin]| {
                let tables = RopeTables { cos_TE2: cos.clone(), sin_TE2: sin.clone() };
                rotate(qkv, &layout, &tables, length, first)
            }))
    }
}

#[cfg(test)]
#[path = "rope_tests.rs"]
mod tests;
