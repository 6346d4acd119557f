//! Which model sizes the GPU kernels support. Pure functions: a run is refused before a GPU is opened.

use std::ops::RangeInclusive;

use crate::HeadLayout;
use crate::fp8::ScaleBlock;

/// Sizes of a model and its sequences that kernels depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    /// Width of the residual stream, D.
    pub hidden_size: usize,
    /// Width of the MLP, I.
    pub intermediate_size: usize,
    /// Query and key/value heads.
    pub heads: HeadLayout,
    /// Whether the query, key and value projections have a bias.
    pub has_qkv_bias: bool,
    /// Positions of the longest sequence, in training or generation.
    pub positions: usize,
}

/// Rows of D, I and E elements begin at multiples of this: kernels load 16 bytes at a time, of any element type.
const ROW_MULTIPLE: usize = 16;
/// Largest hidden size: a norm keeps a whole row in registers.
const MAX_HIDDEN_SIZE: usize = 8192;
/// Head sizes that attention has tiles for.
const HEAD_SIZES: RangeInclusive<usize> = 32..=128;
/// Head sizes in between use the next larger tile, masked in steps of this.
const HEAD_SIZE_MULTIPLE: usize = 8;
/// Maximum number of positions: a grid has at most 65,535 tiles along an axis, and the smallest attention tile has 16
/// positions.
const MAX_POSITIONS: usize = 65_535 * 16;

/// Why a GPU cannot run a model of these sizes, as a clause that follows "a GPU"; None if it can.
pub fn refusal(sizes: &ModelSizes) -> Option<String> {
    let &ModelSizes { hidden_size, intermediate_size, heads, has_qkv_bias, positions } = sizes;
    let head_size = heads.head_size;
    if !HEAD_SIZES.contains(&head_size) || !head_size.is_multiple_of(HEAD_SIZE_MULTIPLE) {
        let (least, most) = HEAD_SIZES.into_inner();
        return Some(format!(
            "supports head sizes {least} to {most} in steps of {HEAD_SIZE_MULTIPLE}, and the head size \
             (model.head_dim) is {head_size}"
        ));
    }
    let packed_width = heads.packed_width();
    if has_qkv_bias && !packed_width.is_multiple_of(ROW_MULTIPLE) {
        return Some(format!(
            "supports biases of query, key and value heads whose elements are a multiple of {ROW_MULTIPLE}, and they \
             are {packed_width}"
        ));
    }
    if hidden_size > MAX_HIDDEN_SIZE || !hidden_size.is_multiple_of(ROW_MULTIPLE) {
        return Some(format!(
            "supports a hidden_size up to {MAX_HIDDEN_SIZE} in steps of {ROW_MULTIPLE}, and it is {hidden_size}"
        ));
    }
    if !intermediate_size.is_multiple_of(ROW_MULTIPLE) {
        return Some(format!(
            "supports an intermediate_size in steps of {ROW_MULTIPLE}, and it is {intermediate_size}"
        ));
    }
    if positions > MAX_POSITIONS {
        return Some(format!("supports sequences of up to {MAX_POSITIONS} positions, and they have {positions}"));
    }
    None
}

/// The blocks of scales that cuBLASLt's fp8 GEMMs take on a GPU, those to be preferred first; none where it has no fp8
/// GEMMs. cuBLAS documentation, "Narrow Precision Data Types Usage": one scale from compute capability 8.9 on; 128 numbers
/// a scale on 9.0 alone, from cuBLAS 12.9 on; 32 a scale from 10.0 and cuBLAS 12.8 on.
pub fn fp8_blocks(compute_capability: (u32, u32), cublas: (u32, u32)) -> &'static [ScaleBlock] {
    match compute_capability {
        (10.., _) if cublas >= (12, 8) => &[ScaleBlock::Square32, ScaleBlock::Tensor],
        (9, 0) if cublas >= (12, 9) => &[ScaleBlock::Square128, ScaleBlock::Tensor],
        capability if capability >= (8, 9) => &[ScaleBlock::Tensor],
        _ => &[],
    }
}

/// Why a GPU cannot multiply a model of these sizes in fp8, as a clause that follows "a GPU"; None if it can. Any number of
/// sequences then has as many tokens as it takes. With a `sequence_length` of 0 it is only to hold weights in fp8.
pub fn fp8_refusal(sizes: &ModelSizes, sequence_length: usize) -> Option<String> {
    let widths = [
        ("the query heads' width", sizes.heads.query_width()),
        ("the query, key and value heads' width", sizes.heads.packed_width()),
        ("data.sequence_length", sequence_length),
    ];
    let odd = widths.into_iter().find(|(_, size)| !size.is_multiple_of(ROW_MULTIPLE));
    odd.map(|(name, size)| {
        format!("computes with fp8 where all sizes are multiples of {ROW_MULTIPLE}, and {name} is {size}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_scales_depend_on_the_gpu_and_on_cublas() {
        let (tensor, square128, square32) = (ScaleBlock::Tensor, ScaleBlock::Square128, ScaleBlock::Square32);
        for (capability, cublas, expected) in [
            ((8, 0), (13, 0), &[][..]),
            ((8, 6), (13, 0), &[]),
            ((8, 9), (12, 6), &[tensor]),
            ((9, 0), (12, 8), &[tensor]),
            ((9, 0), (12, 9), &[square128, tensor]),
            ((10, 0), (12, 8), &[square32, tensor]),
            ((12, 0), (13, 0), &[square32, tensor]),
            ((12, 1), (13, 1), &[square32, tensor]),
        ] {
            assert_eq!(fp8_blocks(capability, cublas), expected, "{capability:?} {cublas:?}");
        }
    }

    #[test]
    fn odd_sizes_are_not_multiplied_in_fp8() {
        assert_eq!(fp8_refusal(&sizes(), 2048), None);
        assert!(fp8_refusal(&sizes(), 100).unwrap().ends_with("and data.sequence_length is 100"));
        assert!(fp8_refusal(&with_odd_heads(), 2048).unwrap().ends_with("the query heads' width is 120"));
    }

    fn sizes() -> ModelSizes {
        let heads = HeadLayout { heads: 32, kv_heads: 8, head_size: 64 };
        ModelSizes { hidden_size: 2048, intermediate_size: 8192, heads, has_qkv_bias: false, positions: 2048 }
    }

    fn with_head_size(head_size: usize) -> ModelSizes {
        ModelSizes { heads: HeadLayout { head_size, ..sizes().heads }, ..sizes() }
    }

    fn with_odd_heads() -> ModelSizes {
        ModelSizes { heads: HeadLayout { heads: 3, kv_heads: 1, head_size: 40 }, ..sizes() }
    }

    #[test]
    fn usual_models_are_supported() {
        assert_eq!(refusal(&sizes()), None);
        for head_size in [32, 40, 64, 96, 128] {
            assert_eq!(refusal(&with_head_size(head_size)), None, "{head_size}");
        }
        assert_eq!(refusal(&ModelSizes { hidden_size: 8192, intermediate_size: 28_672, ..sizes() }), None);
    }

    #[test]
    fn unsupported_sizes_are_refused_with_the_number() {
        let refused = |sizes: ModelSizes, number: &str| {
            let clause = refusal(&sizes).unwrap();
            assert!(clause.starts_with("supports ") && clause.ends_with(number), "{clause}");
        };
        refused(with_head_size(24), "24");
        refused(with_head_size(136), "136");
        refused(with_head_size(68), "68");
        refused(ModelSizes { has_qkv_bias: true, ..with_odd_heads() }, "200");
        assert_eq!(refusal(&with_odd_heads()), None);
        refused(ModelSizes { hidden_size: 2056, ..sizes() }, "2056");
        refused(ModelSizes { hidden_size: 8208, ..sizes() }, "8208");
        refused(ModelSizes { intermediate_size: 5461, ..sizes() }, "5461");
        refused(ModelSizes { positions: MAX_POSITIONS + 1, ..sizes() }, &(MAX_POSITIONS + 1).to_string());
    }
}
