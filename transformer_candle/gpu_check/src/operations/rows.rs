//! Operations on rows: embedding, norms, bias, rotation, `SwiGLU`, dropout, casts and copies.

use kernels::rope::{Frequencies, RopeTables};
use kernels::{DType, Device, HeadLayout, add_rms_norm, bias, cast, dropout, embedding, qk_norm, rope, swiglu};

use super::bounds::{EXACT, F32};
use super::input_generator::InputGenerator;
use crate::case::Case;
use crate::device_under_test::BufferContents;
use crate::part::Size;
use training::Result;

const EPSILON: f32 = 1e-5;

pub(super) fn visit(size: Size, inputs: &mut InputGenerator, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let (hidden, wide, ids, heads) = match size {
        Size::Small => (vec![[7, 64]], vec![[7, 48]], vec![[11, 64, 32]], vec![([2, 1, 32], 2, 5, 0)]),
        Size::Full => (
            vec![[37, 80], [513, 1536], [1024, 2048], [64, 8192]],
            vec![[37, 80], [513, 6144], [1024, 8192]],
            vec![[100, 128, 80], [4096, 16_384, 2048]],
            vec![([6, 2, 40], 2, 33, 0), ([3, 1, 96], 1, 1, 70), ([32, 8, 64], 2, 512, 0), ([16, 4, 128], 1, 300, 5)],
        ),
    };
    for sizes in ids {
        visit(&embedding_forward(inputs, sizes))?;
        visit(&embedding_backward(inputs, sizes))?;
    }
    for sizes in hidden {
        visit(&norm(inputs, sizes))?;
        visit(&norm_of_sum(inputs, sizes))?;
        visit(&normalize(inputs, sizes))?;
        visit(&norm_backward(inputs, sizes))?;
        visit(&bias_forward(inputs, sizes))?;
        visit(&bias_backward(inputs, sizes))?;
    }
    for (heads, batch, length, first) in heads {
        visit(&rotation(inputs, heads, batch, length, first, true)?)?;
        visit(&rotation(inputs, heads, batch, length, first, false)?)?;
        visit(&head_norm_forward(inputs, heads, batch * length))?;
        visit(&head_norm_backward(inputs, heads, batch * length))?;
    }
    for sizes in wide {
        visit(&swiglu_forward(inputs, sizes))?;
        visit(&swiglu_backward(inputs, sizes))?;
        visit(&swiglu_backward_recomputing(inputs, sizes))?;
        visit(&dropout_forward(inputs, sizes))?;
        visit(&dropout_backward(inputs, sizes))?;
        visit(&copy(inputs, sizes))?;
        visit(&cast(inputs, sizes))?;
    }
    Ok(())
}

fn sizes([n, d]: [usize; 2]) -> String {
    format!("{n} x {d}")
}

fn embedding_forward(inputs: &mut InputGenerator, [n, v, d]: [usize; 3]) -> Case {
    Case::new(inputs.name("embedding::forward"), format!("{n} of {v} x {d}"))
        .input("table", &[v, d], inputs.numbers(&[v, d]))
        .input("ids", &[n], inputs.ids(n, v))
        .output("out", &[n, d], inputs.dtype, EXACT)
        .call(|[table, ids, out]| embedding::forward(table, ids, out))
}

fn embedding_backward(inputs: &mut InputGenerator, [n, v, d]: [usize; 3]) -> Case {
    Case::new(inputs.name("embedding::backward"), format!("{n} of {v} x {d}"))
        .input("ids", &[n], inputs.ids(n, v))
        .input("dout", &[n, d], inputs.numbers(&[n, d]))
        .updated("dtable", &[v, d], inputs.f32(&[v, d]), F32)
        .workspace(move |device| embedding::workspace_elements(n, device))
        .call(|[ids, dout, dtable, workspace]| embedding::backward(ids, dout, dtable, workspace))
}

fn norm(inputs: &mut InputGenerator, [n, d]: [usize; 2]) -> Case {
    Case::new(inputs.name("add_rms_norm::forward"), sizes([n, d]))
        .input("x", &[n, d], inputs.numbers(&[n, d]))
        .input("weight", &[d], inputs.numbers(&[d]))
        .output("normed", &[n, d], inputs.dtype, inputs.bound())
        .output("inv_rms", &[n], DType::F32, F32)
        .call(|[x, weight, normed, inv_rms]| add_rms_norm::forward(x, weight, EPSILON, normed, inv_rms))
}

fn norm_of_sum(inputs: &mut InputGenerator, [n, d]: [usize; 2]) -> Case {
    // The norm is taken of the rounded sum, so that its statistics carry that rounding.
    Case::new(inputs.name("add_rms_norm::forward_add"), sizes([n, d]))
        .input("x", &[n, d], inputs.numbers(&[n, d]))
        .input("layer_output", &[n, d], inputs.numbers(&[n, d]))
        .input("weight", &[d], inputs.numbers(&[d]))
        .output("sum", &[n, d], inputs.dtype, inputs.bound())
        .output("normed", &[n, d], inputs.dtype, inputs.bound())
        .output("inv_rms", &[n], DType::F32, inputs.bound())
        .call(|[x, output, weight, sum, normed, inv_rms]| {
            add_rms_norm::forward_add(x, output, weight, EPSILON, sum, normed, inv_rms)
        })
}

/// Returns a random sum and the statistics that the forward pass would have saved of it.
fn saved(inputs: &mut InputGenerator, [n, d]: [usize; 2]) -> [BufferContents; 2] {
    let sum = inputs.numbers(&[n, d]);
    let inv_rms = |row: &[f32]| {
        let squares: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
        (1.0 / (squares / d as f64 + f64::from(EPSILON)).sqrt()) as f32
    };
    let statistics: Vec<f32> = sum.numbers().chunks(d).map(inv_rms).collect();
    [sum, BufferContents::from_numbers(statistics, DType::F32)]
}

fn normalize(inputs: &mut InputGenerator, [n, d]: [usize; 2]) -> Case {
    let [sum, inv_rms] = saved(inputs, [n, d]);
    Case::new(inputs.name("add_rms_norm::normalize"), sizes([n, d]))
        .input("sum", &[n, d], sum)
        .input("weight", &[d], inputs.numbers(&[d]))
        .input("inv_rms", &[n], inv_rms)
        .output("normed", &[n, d], inputs.dtype, inputs.bound())
        .call(|[sum, weight, inv_rms, normed]| add_rms_norm::normalize(sum, weight, inv_rms, normed))
}

fn norm_backward(inputs: &mut InputGenerator, [n, d]: [usize; 2]) -> Case {
    let [sum, inv_rms] = saved(inputs, [n, d]);
    Case::new(inputs.name("add_rms_norm::backward"), sizes([n, d]))
        .input("sum", &[n, d], sum)
        .input("weight", &[d], inputs.numbers(&[d]))
        .input("inv_rms", &[n], inv_rms)
        .input("dnormed", &[n, d], inputs.numbers(&[n, d]))
        .updated("dsum", &[n, d], inputs.numbers(&[n, d]), inputs.bound())
        .updated("dweight", &[d], inputs.f32(&[d]), F32)
        .workspace(move |device| add_rms_norm::workspace_elements(n, d, device))
        .call(|[sum, weight, inv_rms, dnormed, dsum, dweight, workspace]| {
            add_rms_norm::backward(sum, weight, inv_rms, dnormed, dsum, Some(dweight), workspace)
        })
}

fn bias_forward(inputs: &mut InputGenerator, [n, o]: [usize; 2]) -> Case {
    Case::new(inputs.name("bias::forward"), sizes([n, o]))
        .updated("y", &[n, o], inputs.numbers(&[n, o]), inputs.bound())
        .input("bias", &[o], inputs.numbers(&[o]))
        .call(|[y, bias]| bias::forward(y, bias))
}

fn bias_backward(inputs: &mut InputGenerator, [n, o]: [usize; 2]) -> Case {
    Case::new(inputs.name("bias::backward"), sizes([n, o]))
        .input("dy", &[n, o], inputs.numbers(&[n, o]))
        .updated("dbias", &[o], inputs.f32(&[o]), F32)
        .workspace(move |device| bias::workspace_elements(n, o, device))
        .call(|[dy, dbias, workspace]| bias::backward(dy, dbias, workspace))
}

fn head_norm_forward(inputs: &mut InputGenerator, [heads, kv_heads, head_size]: [usize; 3], n: usize) -> Case {
    let layout = HeadLayout { heads, kv_heads, head_size };
    let (rows, weight) = ([n, layout.packed_width()], [2 * head_size]);
    Case::new(inputs.name("qk_norm::forward"), format!("{n}, {heads}/{kv_heads} x {head_size}"))
        .input("projected", &rows, inputs.numbers(&rows))
        .input("weight", &weight, inputs.numbers(&weight))
        .output("qkv", &rows, inputs.dtype, inputs.bound())
        .call(move |[projected, weight, qkv]| qk_norm::forward(projected, weight, EPSILON, &layout, qkv))
}

fn head_norm_backward(inputs: &mut InputGenerator, [heads, kv_heads, head_size]: [usize; 3], n: usize) -> Case {
    let layout = HeadLayout { heads, kv_heads, head_size };
    let (rows, weight) = ([n, layout.packed_width()], [2 * head_size]);
    Case::new(inputs.name("qk_norm::backward"), format!("{n}, {heads}/{kv_heads} x {head_size}"))
        .input("projected", &rows, inputs.numbers(&rows))
        .input("weight", &weight, inputs.numbers(&weight))
        .updated("dqkv", &rows, inputs.numbers(&rows), inputs.bound())
        .updated("dweight", &weight, inputs.f32(&weight), F32)
        .workspace(move |device| qk_norm::workspace_elements(n, head_size, device))
        .call(move |[projected, weight, dqkv, dweight, workspace]| {
            qk_norm::backward(projected, weight, EPSILON, &layout, dqkv, Some(dweight), workspace)
        })
}

fn rotation(
    inputs: &mut InputGenerator,
    [heads, kv_heads, head_size]: [usize; 3],
    batch: usize,
    length: usize,
    first: usize,
    forward: bool,
) -> Result<Case> {
    let layout = HeadLayout { heads, kv_heads, head_size };
    let (positions, half) = (first + length, head_size / 2);
    let (shape, tables) = ([batch * length, layout.packed_width()], [positions, half]);
    let RopeTables { cos_TE2: cos, sin_TE2: sin } =
        rope::tables(positions, head_size, &Frequencies::of_base(10_000.0), &Device::Cpu)?;
    let (name, rotate) = if forward {
        ("rope::forward", rope::forward as fn(&mut _, &_, &_, _, _) -> _)
    } else {
        ("rope::backward", rope::backward as fn(&mut _, &_, &_, _, _) -> _)
    };
    let sizes = format!("{batch} x {length} from {first}, {heads}/{kv_heads} x {head_size}");
    Ok(Case::new(inputs.name(name), sizes)
        .updated("qkv", &shape, inputs.numbers(&shape), inputs.bound())
        .input("cos", &tables, BufferContents::read(&cos)?)
        .input("sin", &tables, BufferContents::read(&sin)?)
        .call(move |[qkv, cos, sin]| {
            let tables = RopeTables { cos_TE2: cos.clone(), sin_TE2: sin.clone() };
            rotate(qkv, &layout, &tables, length, first)
        }))
}

fn swiglu_forward(inputs: &mut InputGenerator, [n, i]: [usize; 2]) -> Case {
    Case::new(inputs.name("swiglu::forward"), sizes([n, i]))
        .input("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]))
        .output("out", &[n, i], inputs.dtype, inputs.bound())
        .call(|[gate_up, out]| swiglu::forward(gate_up, out))
}

fn swiglu_backward(inputs: &mut InputGenerator, [n, i]: [usize; 2]) -> Case {
    Case::new(inputs.name("swiglu::backward"), sizes([n, i]))
        .updated("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]), inputs.bound())
        .input("dout", &[n, i], inputs.numbers(&[n, i]))
        .call(|[gate_up, dout]| swiglu::backward(gate_up, dout))
}

/// On entry, `out` holds the gradient of the output.
fn swiglu_backward_recomputing(inputs: &mut InputGenerator, [n, i]: [usize; 2]) -> Case {
    Case::new(inputs.name("swiglu::backward_recomputing"), sizes([n, i]))
        .updated("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]), inputs.bound())
        .updated("out", &[n, i], inputs.numbers(&[n, i]), inputs.bound())
        .call(|[gate_up, out]| swiglu::backward_recomputing(gate_up, out))
}

/// Dropout with probability 0.1, of module 9.
const DROPOUT: dropout::Dropout = dropout::Dropout { probability: 0.1, module: 9 };

/// Returns a dropout key with row numbers that cross 2^32.
fn dropout_key() -> BufferContents {
    let key = dropout::Key { seed: 0xfedc_ba98_7654_3210, first_row: u64::from(u32::MAX) - 2, enabled: true };
    BufferContents { dtype: DType::U32, bits: key.to_words().to_vec() }
}

// The mask and the rounded values must have exactly the CPU's bits.
fn dropout_forward(inputs: &mut InputGenerator, [n, i]: [usize; 2]) -> Case {
    Case::new(inputs.name("dropout::forward"), sizes([n, i]))
        .in_given_types()
        .input("x", &[n, i], inputs.numbers(&[n, i]))
        .input("key", &[dropout::KEY_ELEMENTS], dropout_key())
        .output("out", &[n, i], inputs.dtype, EXACT)
        .call(|[x, key, out]| dropout::forward(x, key, DROPOUT, out))
}

fn dropout_backward(inputs: &mut InputGenerator, [n, i]: [usize; 2]) -> Case {
    Case::new(inputs.name("dropout::backward"), sizes([n, i]))
        .in_given_types()
        .input("dout", &[n, i], inputs.numbers(&[n, i]))
        .input("key", &[dropout::KEY_ELEMENTS], dropout_key())
        .updated("dx", &[n, i], inputs.numbers(&[n, i]), EXACT)
        .call(|[dout, key, dx]| dropout::backward(dout, key, DROPOUT, dx))
}

/// A copy, and a buffer set to zero.
fn copy(inputs: &mut InputGenerator, shape: [usize; 2]) -> Case {
    Case::new(inputs.name("Buffer::copy_from, zero"), sizes(shape))
        .input("source", &shape, inputs.numbers(&shape))
        .output("copy", &shape, inputs.dtype, EXACT)
        .output("zero", &shape, inputs.dtype, EXACT)
        .call(|[source, copy, zero]| {
            copy.copy_from(source)?;
            zero.zero()
        })
}

/// Casts to the other float type; for F32 also splits master weights into halves and joins them again.
fn cast(inputs: &mut InputGenerator, shape: [usize; 2]) -> Case {
    let source = inputs.numbers(&shape);
    let (name, sizes) = (inputs.name("cast"), sizes(shape));
    if inputs.dtype == DType::BF16 {
        return Case::new(name, sizes)
            .in_given_types()
            .input("source", &shape, source)
            .output("wide", &shape, DType::F32, EXACT)
            .call(|[source, wide]| cast::forward(source, wide));
    }
    Case::new(name, sizes)
        .in_given_types()
        .input("source", &shape, source)
        .output("narrow", &shape, DType::BF16, EXACT)
        .output("weight", &shape, DType::BF16, EXACT)
        .output("low_bits", &shape, DType::I16, EXACT)
        .output("master", &shape, DType::F32, EXACT)
        .call(|[source, narrow, weight, low_bits, master]| {
            cast::forward(source, narrow)?;
            cast::split_master(source, weight, low_bits)?;
            cast::join_master(weight, low_bits, master)
        })
}
