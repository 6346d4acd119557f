//! Checks the launches of every operation against the manifest for every kind of GPU: kernels that exist, argument
//! counts and types, alignment, launchable grids; GEMMs whose matrices lie within their buffers.

use std::collections::HashMap;

use candle_core::DType;

use super::launch::Launch;
use super::manifest::{Entry, Manifest};
use super::*;
use crate::attention::AttentionShape;
use crate::cases::{self, Case, Inputs, Positions, Random, Size};
use crate::testing::zeros;
use crate::{Device, DeviceKind, HeadLayout};

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

fn constant(kernel: &str, name: &str) -> usize {
    kernels()[0][kernel][0].constant(name).unwrap()
}

fn inputs(dtype: DType) -> Inputs {
    Inputs { random: Random::new(1), dtype }
}

/// The names of what a case launches, each checked.
#[track_caller]
fn names(case: &Case) -> Vec<String> {
    let call = || case.run(&mut case.allocate(&Device::Cpu, false)?);
    checked(&recording::record(call).unwrap())
}

/// Names as they are read most easily: those that follow each other once, with their number.
fn in_short(names: &[String]) -> String {
    let runs = names.chunk_by(|one, other| one == other);
    let text = |run: &[String]| if run.len() == 1 { run[0].clone() } else { format!("{} {}", run.len(), run[0]) };
    runs.map(text).collect::<Vec<_>>().join(", ")
}

#[test]
fn every_case_launches_compiled_kernels() {
    let mut lines = Vec::new();
    for (dtype, size) in DTYPES.into_iter().flat_map(|dtype| [Size::Small, Size::Medium].map(|size| (dtype, size))) {
        for make in cases::list(size, dtype) {
            let case = make(&mut inputs(dtype)).unwrap();
            let line = format!("{} {}: {}", case.name, case.sizes, in_short(&names(&case)));
            lines.push(line);
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn norms_of_every_supported_width_have_kernels() {
    let widths = [(16, 1024), (1024, 1024), (1040, 2048), (2064, 4096), (4112, 8192), (8192, 8192)];
    for ((d, wide), dtype) in widths.into_iter().flat_map(|width| DTYPES.map(|dtype| (width, dtype))) {
        let norm = |make: fn(&mut Inputs, [usize; 2]) -> Case| names(&make(&mut inputs(dtype), [3, d]));
        let suffix = if dtype == DType::F32 { "f32" } else { "bf16" };
        let expected = |function: &str| format!("add_rms_norm_{function}.{suffix}.h{wide}");
        assert_eq!(norm(crate::add_rms_norm::cases::norm), [expected("forward")]);
        assert_eq!(norm(crate::add_rms_norm::cases::norm_of_sum), [expected("forward_add")]);
        let backward = |inputs: &mut Inputs, sizes| crate::add_rms_norm::cases::gradient(inputs, sizes, true);
        assert_eq!(norm(backward), [expected("backward"), "add_partial_sums.f32".to_owned()]);
    }
}

#[test]
fn rope_and_qk_norm_support_every_valid_head_size() {
    let variants = [(32, "e32"), (40, "e128m"), (64, "e64"), (72, "e128m"), (96, "e128m"), (128, "e128")];
    for ((head_size, variant), dtype) in variants.into_iter().flat_map(|one| DTYPES.map(|dtype| (one, dtype))) {
        let layout = HeadLayout { heads: 3, kv_heads: 1, head_size };
        let suffix = if dtype == DType::F32 { "f32" } else { "bf16" };
        let positions = Positions { layout, batch: 2, length: 3, first: 2 };
        let rotation = crate::rope::cases::rotation(&mut inputs(dtype), positions, false).unwrap();
        assert_eq!(names(&rotation), [format!("rope_rotate.{suffix}.{variant}")]);
        let norm = crate::qk_norm::cases::norm(&mut inputs(dtype), 6, layout);
        assert_eq!(names(&norm), [format!("qk_norm_forward.{suffix}.{variant}")]);
        let gradient = crate::qk_norm::cases::gradient(&mut inputs(dtype), 6, layout);
        let expected = [format!("qk_norm_backward.{suffix}.{variant}"), "add_partial_sums.f32".to_owned()];
        assert_eq!(names(&gradient), expected);
    }
}

#[test]
fn attention_supports_every_valid_head_size() {
    use crate::attention::cases;
    for head_size in (32..=128usize).step_by(8) {
        let columns = head_size.next_power_of_two();
        let masked = if head_size == 32 { "e32".to_owned() } else { format!("e{columns}m") };
        let heads = HeadLayout { heads: 6, kv_heads: 2, head_size };
        let shape = AttentionShape { heads, batch: 2, sequence_length: 300 };
        for (dtype, suffix) in DTYPES.into_iter().zip(["f32", "bf16"]) {
            let exact = dtype == DType::BF16 && head_size == columns;
            let variant = if exact { format!("e{columns}") } else { masked.clone() };
            for packed in [false, true] {
                let documents = if packed { ".documents" } else { "" };
                let sizes = cases::Sizes { shape, packed };
                let forward = names(&cases::outputs(&mut inputs(dtype), sizes));
                assert_eq!(forward, [format!("attention_forward.{suffix}.{variant}{documents}")]);
                let backward = names(&cases::gradient(&mut inputs(dtype), sizes).unwrap());
                let parts = ["queries", "keys"];
                assert_eq!(backward, parts.map(|of| format!("attention_backward_{of}.{suffix}.{variant}{documents}")));
            }
            let decode = |new, past| names(&cases::decoding(&mut inputs(dtype), heads, new, past));
            let append = || format!("attention_append.{suffix}");
            assert_eq!(decode(600, 100), [append(), format!("attention_decode.{suffix}.{masked}")]);
            let split = [
                append(),
                format!("attention_decode_split.{suffix}.{masked}"),
                format!("attention_decode_reduce.{suffix}.e{columns}"),
            ];
            assert_eq!(decode(1, 600), split);
        }
    }
}

#[test]
fn flat_buffers_of_any_length_are_covered() {
    let state = adamw_state(DType::F32);
    let settings = crate::adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let buffers = [state.grad, state.weight];
    assert_eq!(checked(&accumulate::forward(buffers, (1 << 30) + 1)), ["accumulate_forward.f32"; 2]);
    assert!(accumulate::forward(buffers, 0).is_empty());
    for dtype in DTYPES {
        let launches = adamw::step(&adamw_state(dtype), &settings, 0.1, (1 << 31) + 64);
        assert_eq!(checked(&launches).len(), 3, "more than 2^31 elements");
    }
}

#[test]
fn partial_sums_are_bounded() {
    let elements = |n| crate::bias::workspace_elements(n, 2048, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 2048, 128 * 2048]);
    let elements = |n| crate::qk_norm::workspace_elements(n, 128, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 256, 512 * 256]);
}

#[test]
fn the_norms_workspace_is_bounded() {
    let elements = |n| crate::add_rms_norm::workspace_elements(n, 2048, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(5), elements(1 << 20)], [0, 5 * 2048, 512 * 2048]);
}

#[test]
fn attention_covers_every_head_and_position_once() {
    let layout = HeadLayout { heads: 6, kv_heads: 2, head_size: 64 };
    let [qkv, out] = [layout.packed_width(), layout.query_width()].map(|width| value(&[900, width], DType::BF16));
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
fn the_parts_of_the_heads_workspace_do_not_overlap() {
    let whole = zeros(&[crate::head_cross_entropy::workspace_elements(3, 16, 64, DeviceKind::Cuda) + 1], DType::F32);
    let workspace = whole.view(1, &[whole.elements() - 1]).unwrap();
    let matmuls = Workspace { bytes: WORKSPACE_BYTES, ..Workspace::from_buffer(&workspace) };
    let rest = whole.address() + (1 + WORKSPACE_ELEMENTS) * 4;
    assert!(matmuls.address >= workspace.address() && matmuls.address + matmuls.bytes <= rest);
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
fn workspaces_match_the_pieces_of_their_kernels() {
    let piece = constant("grad_norm_squares.f32", "PIECE");
    let elements = |pieces: usize| crate::grad_norm::workspace_elements(pieces * piece, DeviceKind::Cuda);
    assert_eq!([elements(0), elements(1), elements(5)], [0, 2, 10]);
    for kernel in ["squares.f32", "normalize.f32", "squares.bf16", "normalize.bf16"] {
        assert_eq!(constant(&format!("muon_{kernel}"), "PIECE"), 1 << 15, "what the workspace counts by");
    }
}
