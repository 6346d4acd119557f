//! Checks the launches of every operation against the manifest for every kind of GPU: kernels that exist, argument
//! counts and types, alignment, launchable grids; GEMMs whose matrices lie within their buffers.

use std::collections::HashMap;

use candle_core::DType;

use super::head_cross_entropy::{Gradients, Inputs};
use super::launch::Launch;
use super::manifest::{Entry, Manifest};
use super::*;
use crate::attention::AttentionShape;
use crate::head_sizes::HeadSizes;
use crate::testing::zeros;
use crate::{DeviceKind, HeadLayout, WriteMode};

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

fn kernels() -> [HashMap<String, Vec<Entry>>; 4] {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/triton/ptx/manifest.json");
    let text = std::fs::read_to_string(path).unwrap();
    [(8, 0), (8, 6), (9, 0), (12, 0)].map(|capability| Manifest::for_gpu(&text, capability).unwrap())
}

/// The names of the launched kernels and GEMMs, each checked against the manifest of every kind of GPU.
#[track_caller]
fn checked(launches: &[Launch]) -> Vec<String> {
    let mut names = Vec::new();
    for kernels in kernels() {
        names.clear();
        for launch in launches {
            match launch {
                Launch::Gemm(matmul) => {
                    matmul.check().unwrap();
                    names.push("gemm".to_owned());
                }
                Launch::Kernel(kernel) => {
                    let variants = kernels.get(&kernel.kernel).unwrap_or_else(|| panic!("no kernel {}", kernel.kernel));
                    for entry in variants {
                        let grid = kernel.blocks(|name| entry.constant(name).unwrap());
                        if let Err(problem) = entry.check(grid, &kernel.values) {
                            panic!("{}: {problem}", entry.file);
                        }
                    }
                    names.push(kernel.kernel.clone());
                }
            }
        }
    }
    names
}

fn value(shape: &[usize], dtype: DType) -> KernelArg {
    KernelArg::from(&zeros(shape, dtype))
}

fn rows<const N: usize>(n: usize, width: usize, dtype: DType) -> [KernelArg; N] {
    [(); N].map(|()| value(&[n, width], dtype))
}

fn constant(kernel: &str, name: &str) -> usize {
    kernels()[0][kernel][0].constant(name).unwrap()
}

#[test]
fn embedding_launches_compiled_kernels() {
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let [table, out] = rows(7, 48, dtype);
        let (ids, dtable) = (value(&[7], DType::U32), value(&[7, 48], DType::F32));
        let forward = embedding::forward(table, ids, out, [7, 7, 48]);
        assert_eq!(checked(&forward), [format!("embedding_forward.{suffix}")]);
        let space = zeros(&[crate::embedding::workspace_elements(7, DeviceKind::Cuda)], DType::F32);
        let backward = embedding::backward(ids, out, dtable, embedding::chains(&space, 7), [7, 7, 48]);
        assert_eq!(checked(&backward), ["embedding_chain.u32".to_owned(), format!("embedding_backward.{suffix}")]);
    }
}

#[test]
fn norms_of_every_supported_width_have_kernels() {
    let widths = [(16, 1024), (1024, 1024), (1040, 2048), (2064, 4096), (4112, 8192), (8192, 8192)];
    for ((d, wide), dtype) in widths.into_iter().flat_map(|width| DTYPES.map(|dtype| (width, dtype))) {
        let [x, output, sum, normed] = rows(3, d, dtype);
        let (weight, inv_rms) = (value(&[d], dtype), value(&[3], DType::F32));
        let suffix = if dtype == DType::F32 { "f32" } else { "bf16" };
        let forward = add_rms_norm::forward(x, weight, 1e-5, [normed, inv_rms], [3, d]);
        assert_eq!(checked(&forward), [format!("add_rms_norm_forward.{suffix}.h{wide}")]);
        let forward = add_rms_norm::forward_add([x, output], weight, 1e-5, [sum, normed, inv_rms], [3, d]);
        assert_eq!(checked(&forward), [format!("add_rms_norm_forward_add.{suffix}.h{wide}")]);
        let again = add_rms_norm::normalize([sum, weight, inv_rms], normed, [3, d]);
        assert_eq!(checked(&again), [format!("add_rms_norm_normalize.{suffix}")]);
        let partials = value(&[crate::add_rms_norm::workspace_elements(3, d, DeviceKind::Cuda)], DType::F32);
        let backward = |dweight| {
            let saved = [sum, weight, inv_rms];
            checked(&add_rms_norm::backward(saved, normed, (x, dweight), partials, [3, d]))
        };
        let names = [format!("add_rms_norm_backward.{suffix}.h{wide}"), "add_partial_sums.f32".to_owned()];
        assert_eq!(backward(Some(value(&[d], DType::F32))), names);
        assert_eq!(backward(None), names[..1], "a frozen weight");
    }
}

#[test]
fn the_norms_workspace_is_bounded() {
    let elements = |n| crate::add_rms_norm::workspace_elements(n, 2048, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 2048, 512 * 2048]);
}

#[test]
fn rope_and_qk_norm_support_every_valid_head_size() {
    let variants = [(32, "e32"), (40, "e128m"), (64, "e64"), (72, "e128m"), (96, "e128m"), (128, "e128")];
    for ((head_size, variant), dtype) in variants.into_iter().flat_map(|one| DTYPES.map(|dtype| (one, dtype))) {
        let layout = HeadLayout { heads: 3, kv_heads: 1, head_size };
        let [qkv, projected] = rows(6, layout.packed_width(), dtype);
        let places = rope::Rotation { rows: 6, sequence_length: 3, first_position: 2, direction: -1.0 };
        let suffix = if dtype == DType::F32 { "f32" } else { "bf16" };
        let names = checked(&rope::rotate(qkv, &layout, rows(5, head_size / 2, DType::F32), places));
        assert_eq!(names, [format!("rope_rotate.{suffix}.{variant}")]);
        let arguments = [projected, value(&[2 * head_size], dtype), qkv];
        let names = checked(&qk_norm::forward(arguments, 1e-6, &layout, 6));
        assert_eq!(names, [format!("qk_norm_forward.{suffix}.{variant}")]);
        let partials = value(&[crate::qk_norm::workspace_elements(6, head_size, DeviceKind::Cuda)], DType::F32);
        let dweight = value(&[2 * head_size], DType::F32);
        let names = checked(&qk_norm::backward(arguments, Some(dweight), partials, 1e-6, &layout, 6));
        assert_eq!(names, [format!("qk_norm_backward.{suffix}.{variant}"), "add_partial_sums.f32".to_owned()]);
    }
}

#[test]
fn accumulate_launches_compiled_kernels() {
    let buffers = rows(1, 4001, DType::F32);
    assert_eq!(checked(&accumulate::forward(buffers, 4001)), ["accumulate_forward.f32"]);
    assert_eq!(checked(&accumulate::forward(buffers, (1 << 30) + 1)), ["accumulate_forward.f32"; 2]);
    assert!(accumulate::forward(buffers, 0).is_empty());
}

#[test]
fn dropout_launches_compiled_kernels() {
    let (key, dropout) = (value(&[5], DType::U32), crate::dropout::Dropout { probability: 0.1, module: u64::MAX });
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let [one, other] = rows(7, 1040, dtype);
        assert_eq!(
            checked(&dropout::forward([one, key, other], dropout, [7, 1040])),
            [format!("dropout_forward.{suffix}")]
        );
        assert_eq!(
            checked(&dropout::backward([one, key, other], dropout, [7, 1040])),
            [format!("dropout_backward.{suffix}")]
        );
    }
}

#[test]
fn bias_launches_compiled_kernels() {
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let ([y], bias, dbias) = (rows(7, 1040, dtype), value(&[1040], dtype), value(&[1040], DType::F32));
        assert_eq!(checked(&bias::forward(y, bias, [7, 1040])), [format!("bias_forward.{suffix}")]);
        let partials = value(&[crate::bias::workspace_elements(7, 1040, DeviceKind::Cuda)], DType::F32);
        let names = checked(&bias::backward(y, dbias, partials, [7, 1040]));
        assert_eq!(names, [format!("bias_backward.{suffix}"), "add_partial_sums.f32".to_owned()]);
    }
}

#[test]
fn partial_sums_are_bounded() {
    let elements = |n| crate::bias::workspace_elements(n, 2048, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 2048, 128 * 2048]);
    let elements = |n| crate::qk_norm::workspace_elements(n, 128, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 256, 512 * 256]);
}

/// Names of the kernels that attention's three functions launch, the last one for many tokens and for one.
fn attention_names(dtype: DType, head_size: usize, has_documents: bool) -> [Vec<String>; 4] {
    let layout = HeadLayout { heads: 6, kv_heads: 2, head_size };
    let (n, query_width) = (2 * 300, layout.query_width());
    let [qkv, dqkv] = rows(n, layout.packed_width(), dtype);
    let [out, dout] = rows(n, query_width, dtype);
    let [keys, values] = rows(700, layout.key_width(), dtype);
    let lse = value(&[2, 6, 300], DType::F32);
    let documents = has_documents.then(|| value(&[n], DType::I32));
    let shape = AttentionShape { heads: layout, batch: 2, sequence_length: 300 };
    let statistics = crate::attention::backward_workspace_elements(&shape, DeviceKind::Cuda);
    let statistics = value(&[statistics], DType::F32);
    let space = value(&[crate::attention::decode_workspace_elements(&layout, n, DeviceKind::Cuda)], DType::F32);
    let saved = attention::Saved { qkv, documents, out, lse, dout };
    let cache = attention::Cache { keys, values, past: 100 };
    [
        checked(&attention::forward(qkv, documents, [out, lse], &shape)),
        checked(&attention::backward(&saved, dqkv, statistics, &shape)),
        checked(&attention::decode(qkv, cache, [out, space], &layout, n)),
        checked(&attention::decode(qkv, attention::Cache { past: 600, ..cache }, [out, space], &layout, 1)),
    ]
}

#[test]
fn attention_supports_every_valid_head_size() {
    for head_size in (32..=128usize).step_by(8) {
        let columns = head_size.next_power_of_two();
        let masked = if head_size == 32 { "e32".to_owned() } else { format!("e{columns}m") };
        for has_documents in [false, true] {
            let documents = if has_documents { ".documents" } else { "" };
            for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
                let exact = dtype == DType::BF16 && head_size == columns;
                let variant = if exact { format!("e{columns}") } else { masked.clone() };
                let [forward, backward, decode, decode_one] = attention_names(dtype, head_size, has_documents);
                assert_eq!(forward, [format!("attention_forward.{suffix}.{variant}{documents}")]);
                let names =
                    ["queries", "keys"].map(|of| format!("attention_backward_{of}.{suffix}.{variant}{documents}"));
                assert_eq!(backward, names);
                let names = [format!("attention_append.{suffix}"), format!("attention_decode.{suffix}.{masked}")];
                assert_eq!(decode, names);
                let names = [
                    format!("attention_append.{suffix}"),
                    format!("attention_decode_split.{suffix}.{masked}"),
                    format!("attention_decode_reduce.{suffix}.e{columns}"),
                ];
                assert_eq!(decode_one, names);
            }
        }
    }
}

#[test]
fn attention_covers_every_head_and_position_once() {
    let layout = HeadLayout { heads: 6, kv_heads: 2, head_size: 64 };
    let ([qkv], [out]) = (rows(900, layout.packed_width(), DType::BF16), rows(900, layout.query_width(), DType::BF16));
    let lse = value(&[3, 6, 300], DType::F32);
    let shape = AttentionShape { heads: layout, batch: 3, sequence_length: 300 };
    let saved = attention::Saved { qkv, documents: None, out, lse, dout: out };
    let [forward] = attention::forward(qkv, None, [out, lse], &shape);
    let [queries, keys] = attention::backward(&saved, qkv, lse, &shape);
    let decode = |past, new| {
        let cache = attention::Cache { keys: out, values: out, past };
        attention::decode(qkv, cache, [out, lse], &layout, new)
    };
    let blocks = |launch: &Launch| {
        let Launch::Kernel(kernel) = launch else { panic!("{launch:?}") };
        kernel.blocks(|_| 64)
    };
    assert_eq!([&forward, &queries, &keys].map(blocks), [[18, 5, 1], [18, 5, 1], [6, 5, 1]]);
    assert_eq!(decode(7, 900).iter().map(blocks).collect::<Vec<_>>(), [[900, 1, 1], [2, 43, 1]]);
    assert_eq!(decode(899, 1).iter().map(blocks).collect::<Vec<_>>(), [[1, 1, 1], [2, 1, 14], [6, 1, 1]]);
}

#[test]
fn decoding_counts_rows_and_splits_as_its_kernels_do() {
    for (variant, columns) in [("e32", "e32"), ("e64m", "e64"), ("e128m", "e128")] {
        for suffix in ["f32", "bf16"] {
            for kernel in ["attention_decode", "attention_decode_split"] {
                assert_eq!(constant(&format!("{kernel}.{suffix}.{variant}"), "BLOCK_M"), attention::DECODE_ROWS);
            }
            let reduce = format!("attention_decode_reduce.{suffix}.{columns}");
            assert_eq!(constant(&reduce, "SPLITS"), attention::MOST_SPLITS);
        }
    }
}

#[test]
fn swiglu_launches_compiled_kernels() {
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let ([gate_up], [out]) = (rows(3, 96, dtype), rows(3, 48, dtype));
        assert_eq!(checked(&swiglu::forward(gate_up, out, [3, 48])), [format!("swiglu_forward.{suffix}")]);
        let backward = swiglu::backward(gate_up, out, [3, 48]);
        assert_eq!(checked(&backward), [format!("swiglu_backward.{suffix}")]);
        let backward = swiglu::backward_recomputing(gate_up, out, [3, 48]);
        assert_eq!(checked(&backward), [format!("swiglu_backward_recomputing.{suffix}")]);
    }
}

/// Names of what `forward_backward` and `forward` launch for a head with sizes [N, D, V, real vocabulary, C].
fn head([n, d, v, vocab_size, c]: [usize; 5], dtype: DType) -> [Vec<String>; 2] {
    let [hidden, weight, dhidden] = [n, v, n].map(|rows| zeros(&[rows, d], dtype));
    let (targets, losses) = (zeros(&[n], DType::I32), value(&[n], DType::F32));
    let (logits, dweight) = (zeros(&[c, v], DType::F32), zeros(&[v, d], DType::F32));
    let elements = crate::head_cross_entropy::workspace_elements(c, d, v, DeviceKind::Cuda);
    let workspace = zeros(&[elements], DType::F32);
    let sizes = HeadSizes { n, d, v, vocab_size, c, w: v };
    let inputs = Inputs::new([&hidden, &weight], &targets, &logits, &workspace, sizes);
    let [scale, loss] = [(); 2].map(|()| value(&[1], DType::F32));
    let write_mode = WriteMode::Overwrite;
    let (dhidden, dweight) = ((&dhidden).into(), Some((&dweight).into()));
    let gradients = Gradients { scale, loss, dhidden, dweight, write_mode, z_loss: 1e-4 };
    let training = head_cross_entropy::forward_backward(&inputs, &gradients);
    [checked(&training), checked(&head_cross_entropy::forward(&inputs, losses))]
}

#[test]
fn the_head_launches_every_chunk() {
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let gradients = format!("head_cross_entropy_gradients.{suffix}");
        let chunk = ["gemm", &gradients, "head_cross_entropy_total.f32", "gemm", "gemm"];
        let losses = ["gemm", "head_cross_entropy_losses.f32"];
        for (c, chunks) in [(7, 1), (3, 3), (100, 1)] {
            let [training, evaluation] = head([7, 32, 64, 50, c], dtype);
            assert_eq!(training, chunk.repeat(chunks), "{c}");
            assert_eq!(evaluation, losses.repeat(chunks), "{c}");
        }
        assert!(head([0, 32, 64, 50, 4], dtype).iter().all(Vec::is_empty));
    }
}

#[test]
fn the_parts_of_the_heads_workspace_do_not_overlap() {
    let whole = zeros(&[crate::head_cross_entropy::workspace_elements(3, 16, 64, DeviceKind::Cuda) + 1], DType::F32);
    let workspace = whole.view(1, &[whole.elements() - 1]).unwrap();
    let matmuls = Workspace { bytes: WORKSPACE_BYTES, ..Workspace::from_buffer(&workspace) };
    let rest = whole.address() + (1 + WORKSPACE_ELEMENTS) * 4;
    assert!(matmuls.address >= workspace.address() && matmuls.address + matmuls.bytes <= rest);
}

#[test]
fn grad_norm_pieces_match_its_workspace() {
    let (grads, norm) = (zeros(&[100_003], DType::F32), value(&[1], DType::F32));
    let partials = value(&[crate::grad_norm::workspace_elements(100_003, DeviceKind::Cuda)], DType::F32);
    let names = checked(&grad_norm::forward([(&grads).into(), norm, partials], 100_003));
    assert_eq!(names, ["grad_norm_squares.f32", "grad_norm_total.f32"]);
    let piece = constant("grad_norm_squares.f32", "PIECE");
    let elements = |pieces: usize| crate::grad_norm::workspace_elements(pieces * piece, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(1), elements(5)], [0, 2, 10]);
    assert_eq!(checked(&grad_norm::clip(norm, Some(1.0), value(&[5], DType::F32))), ["grad_norm_clip.f32"]);
}

#[test]
fn clipping_writes_where_the_optimizer_reads() {
    assert_eq!(constant("grad_norm_clip.f32", "CLIP_SCALE"), crate::adamw::CLIP_SCALE);
    assert_eq!(constant("grad_norm_clip.f32", "APPLY"), crate::adamw::APPLY);
}

fn adamw_state(dtype: DType) -> adamw::State {
    let flat = |dtype| value(&[4096], dtype);
    adamw::State {
        weight: flat(dtype),
        low_bits: (dtype == DType::BF16).then(|| flat(DType::I16)),
        grad: flat(DType::F32),
        moments: [flat(DType::F32), flat(DType::F32)],
        scalars: value(&[crate::adamw::SCALARS], DType::F32),
    }
}

#[test]
fn adamw_launches_compiled_kernels() {
    let settings = crate::adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    for (dtype, kernel) in DTYPES.into_iter().zip(["adamw_step.f32", "adamw_step.bf16"]) {
        let state = adamw_state(dtype);
        assert_eq!(checked(&adamw::step(&state, &settings, 0.1, 4001)), [kernel]);
        assert_eq!(
            checked(&adamw::step(&state, &settings, 0.1, (1 << 31) + 64)),
            [kernel; 3],
            "more than 2^31 elements"
        );
    }
}

#[test]
fn muon_launches_compiled_kernels() {
    let settings = crate::muon::Muon { momentum: 0.95, polynomials: crate::muon::Polynomials::Quintic };
    for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
        let adamw::State { weight, low_bits, grad, scalars, .. } = adamw_state(dtype);
        let momentum = muon::accumulate_momentum([grad, grad, weight, scalars], &settings, 4001);
        assert_eq!(checked(&momentum), [format!("muon_momentum.{suffix}")]);
        let state = muon::State { weight, low_bits, update: weight, scalars };
        assert_eq!(checked(&muon::step(&state, 0.2, 0.1, 4001)), [format!("muon_step.{suffix}")]);

        for (sizes, short) in [([3, 16, 48], 16), ([3, 48, 16], 16), ([1, 32, 32], 32), ([0, 16, 16], 16)] {
            let [update, other] = [(); 2].map(|()| zeros(&sizes, dtype));
            let [gram, polynomial] = [(); 2].map(|()| zeros(&[sizes[0], short, short], dtype));
            let workspace = zeros(&[crate::muon::workspace_elements(sizes, DeviceKind::Cuda)], DType::F32);
            let matrices = muon::Matrices {
                update: (&update).into(),
                other: (&other).into(),
                gram: (&gram).into(),
                polynomial: (&polynomial).into(),
                workspace: Workspace::from_buffer(&workspace),
            };
            let launches = muon::orthogonalize(&matrices, sizes, settings.polynomials);
            let [squares, normalize, polynomial] =
                ["squares", "normalize", "polynomial"].map(|pass| format!("muon_{pass}.{suffix}"));
            let iterations = ["gemm", "gemm", &polynomial, "gemm"].repeat(5);
            let expected = [vec![&*squares, &*normalize], iterations].concat();
            assert_eq!(checked(&launches), if sizes[0] == 0 { vec![] } else { expected });
        }
        for kernel in ["squares", "normalize"] {
            assert_eq!(constant(&format!("muon_{kernel}.{suffix}"), "PIECE"), 1 << 15, "what the workspace counts by");
        }
    }
}

#[test]
fn launches_of_a_flat_buffer_are_contiguous() {
    let state = adamw_state(DType::BF16);
    let settings = crate::adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let launches = adamw::step(&state, &settings, 0.1, (1 << 30) + 5);
    let addresses = |launch: &Launch| match launch {
        Launch::Kernel(kernel) => [0, 1, 2].map(|index| match kernel.values[index] {
            KernelArg::Pointer { address, .. } => address,
            KernelArg::I32(_) | KernelArg::F32(_) => unreachable!("buffers come first"),
        }),
        Launch::Gemm(_) => unreachable!("a step has no matmuls"),
    };
    let (first, second) = (addresses(&launches[0]), addresses(&launches[1]));
    let bytes = [0, 1, 2].map(|index| second[index] - first[index]);
    assert_eq!(bytes, [2 << 30, 2 << 30, 4 << 30]);
}

#[test]
fn casts_launch_compiled_kernels() {
    let [wide, master] = [(); 2].map(|()| value(&[77], DType::F32));
    let (narrow, low_bits) = (value(&[77], DType::BF16), value(&[77], DType::I16));
    assert_eq!(checked(&cast::narrow(wide, narrow, 77)), ["cast_narrow.bf16"]);
    assert_eq!(checked(&cast::widen(narrow, wide, 77)), ["cast_widen.f32"]);
    assert_eq!(checked(&cast::split([master, narrow, low_bits], 77)), ["cast_split.bf16"]);
    assert_eq!(checked(&cast::join([narrow, low_bits, master], 77)), ["cast_join.f32"]);
}
