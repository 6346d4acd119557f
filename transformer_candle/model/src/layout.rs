//! The layout of the flat buffers: the place of each parameter.
//!
//! Weights, gradients and optimizer state are one flat buffer each with the same layout, so that clipping and `AdamW`
//! are one pass over each. Parameters lie kind by kind, those of a kind in the order of the model. What trains comes
//! first: gradients and state end behind it, so that frozen weights have none. Frozen projections that are held in fp8
//! come last: the flat buffer of weights ends before them, and their offsets are only names for them.

use std::ops::Range;

use kernels::Buffer;

use crate::parameters::{ParameterKind, ParameterSpec, Parameters, specs};
use crate::weight::Weight;
use crate::weights::Weights;
use crate::{ModelShape, Result};

/// Every parameter begins at a multiple of this many elements, so that its first byte is aligned for vector loads of
/// any element type. The elements in between are zero, get no gradient, and stay zero.
const ALIGNMENT: usize = 64;

/// A parameter and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// The description of the parameter.
    pub spec: ParameterSpec,
    /// First element in the flat buffers.
    pub offset: usize,
}

/// One tensor as `transformers` names it, and its range of the flat buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// The name on disk: `model.layers.0.self_attn.q_proj.weight`, ...
    pub name: String,
    /// Matrices are `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// First element in the flat buffers.
    pub offset: usize,
    /// The number of elements.
    pub elements: usize,
}

impl Parameter {
    /// The tensors on disk that it is made of.
    pub fn hf_tensors(&self) -> impl Iterator<Item = HfTensor> {
        let width = self.spec.row_elements();
        self.spec.hugging_face.iter().map(move |tensor| {
            let mut shape = self.spec.shape.clone();
            shape[0] = tensor.rows;
            let offset = self.offset + tensor.first_row * width;
            HfTensor { name: tensor.name.clone(), shape, offset, elements: tensor.rows * width }
        })
    }
}

/// The number of kinds.
const KINDS: usize = ParameterKind::ALL.len();

/// The parameters of a model with their places.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterLayout {
    shape: ModelShape,
    parameters: Vec<Parameter>,
    /// The kinds in the order of the flat buffers.
    order: [ParameterKind; KINDS],
    /// The first element of each kind, in the order of [`ParameterKind::ALL`].
    kind_starts: [usize; KINDS],
    elements: usize,
}

/// Places parameters one after the other, from these first free elements of each kind on.
struct NextOffsets([usize; KINDS]);

impl NextOffsets {
    fn place(&mut self, spec: ParameterSpec) -> Parameter {
        let next = &mut self.0[spec.kind as usize];
        let offset = *next;
        *next += aligned_elements(&spec);
        Parameter { spec, offset }
    }
}

/// The elements from a parameter to the next, padding included.
fn aligned_elements(spec: &ParameterSpec) -> usize {
    spec.elements().next_multiple_of(ALIGNMENT)
}

/// The kinds in the order of the flat buffers.
fn order(shape: &ModelShape) -> [ParameterKind; KINDS] {
    let mut order = ParameterKind::ALL;
    if shape.has_fp8_base() {
        // A stable sort: the others stay as they are.
        order.sort_by_key(|kind| *kind == ParameterKind::Projection);
    }
    order
}

impl ParameterLayout {
    /// The layout of a model of this shape.
    pub fn new(shape: &ModelShape) -> Self {
        let specs = specs(shape);
        let order = order(shape);
        let (mut elements, mut kind_starts) = (0, [0; KINDS]);
        for kind in order {
            kind_starts[kind as usize] = elements;
            elements += specs.iter().filter(|spec| spec.kind == kind).map(aligned_elements).sum::<usize>();
        }
        if shape.has_fp8_base() {
            elements = kind_starts[ParameterKind::Projection as usize];
        }
        let mut next = NextOffsets(kind_starts);
        let parameters = specs.into_iter().map(|spec| next.place(spec)).collect();
        Self { shape: shape.clone(), parameters, order, kind_starts, elements }
    }

    /// Every parameter, in the order of the model.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Every parameter, in the order of the flat buffers.
    pub fn by_offset(&self) -> impl Iterator<Item = &Parameter> {
        let of_kind = |kind| self.parameters.iter().filter(move |parameter| parameter.spec.kind == kind);
        self.order.into_iter().flat_map(of_kind)
    }

    /// The frozen projections that are held in fp8, none in the flat buffer.
    pub(crate) fn fp8_projections(&self) -> impl Iterator<Item = &Parameter> {
        self.by_offset().filter(|parameter| parameter.offset >= self.elements)
    }

    /// Every parameter's views of weights, and of flat gradients of [`ParameterLayout::trainable_elements`].
    pub fn weights(&self, weights: &Weights, gradients: Option<&Buffer>) -> Result<Parameters<Weight>> {
        let mut next = NextOffsets(self.kind_starts);
        Parameters::build(&self.shape, |spec| {
            let Parameter { spec, offset } = next.place(spec);
            if let Some(weight) = weights.fp8.as_ref().and_then(|fp8| fp8.weight(offset)) {
                return Ok(weight);
            }
            Ok(Weight {
                values: weights.flat.view(offset, &spec.shape)?,
                scales: None,
                gradient: gradients
                    .filter(|gradients| offset < gradients.elements())
                    .map(|gradients| gradients.view(offset, &spec.shape))
                    .transpose()?,
            })
        })
    }

    /// The number of parts that [`crate::Decoder::forward_backward_in_parts`] divides a micro-batch into: the head,
    /// then a block each.
    pub fn backward_parts(&self) -> usize {
        self.shape.num_layers + 1
    }

    /// The part of a micro-batch, from 0, after which the gradient of a parameter does not change any more. The
    /// backward pass begins with the head and ends with the first block and the embedding, which a tied head is; the
    /// few norms and biases are counted with these.
    pub fn completed_by(&self, parameter: &Parameter) -> usize {
        let last = self.shape.num_layers;
        match (parameter.spec.kind, parameter.spec.layer) {
            (ParameterKind::Adapter | ParameterKind::Projection, Some(layer)) => last - layer,
            (ParameterKind::Head, _) => 0,
            _ => last,
        }
    }

    /// See [`ModelShape::width_ratio`].
    pub fn width_ratio(&self) -> f64 {
        self.shape.width_ratio()
    }

    /// Elements of the flat weights, the few between parameters included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The range of a kind's elements in a flat buffer; empty behind its end.
    pub fn range(&self, kind: ParameterKind) -> Range<usize> {
        let start = self.kind_starts[kind as usize].min(self.elements);
        let next_kind = self.order.into_iter().skip_while(|other| *other != kind).nth(1);
        start..next_kind.map_or(self.elements, |next| self.kind_starts[next as usize])
    }

    /// Elements at the front of a flat buffer that train: the adapters, or all where there are none.
    pub fn trainable_elements(&self) -> usize {
        if self.shape.lora.is_some() { self.range(ParameterKind::Adapter).end } else { self.elements }
    }

    /// Elements at the front of a flat buffer that weight decay applies to.
    pub fn decayed_elements(&self) -> usize {
        self.range(ParameterKind::Embedding).start.min(self.trainable_elements())
    }

    /// The parameter of this name.
    #[cfg(test)]
    pub(crate) fn get(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|parameter| parameter.spec.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::{one_billion, tiny};

    #[test]
    fn decayed_parameters_come_first_and_nothing_overlaps() {
        for tied in [true, false] {
            let layout = ParameterLayout::new(&tiny(tied));
            let mut end = 0;
            for Parameter { spec, offset } in layout.by_offset() {
                assert!(*offset >= end && offset % ALIGNMENT == 0, "{}", spec.name);
                assert!(layout.range(spec.kind).contains(offset), "{}", spec.name);
                let decayed = !matches!(spec.kind, ParameterKind::Embedding | ParameterKind::Vector);
                assert_eq!(decayed, *offset < layout.decayed_elements(), "{}", spec.name);
                end = offset + spec.elements();
            }
            assert!(end <= layout.elements());
            assert_eq!(layout.get("lm_head").is_some(), !tied);
        }
    }

    #[test]
    fn norms_and_embeddings_are_not_decayed() {
        let layout = ParameterLayout::new(&tiny(false));
        let kind = |name: &str| layout.get(name).unwrap().spec.kind;
        assert_eq!(kind("lm_head"), ParameterKind::Head);
        assert!(["layers.2.down", "layers.0.qkv"].iter().all(|name| kind(name) == ParameterKind::Projection));
        assert_eq!(kind("embed_tokens"), ParameterKind::Embedding);
        assert!(["layers.1.mlp_norm", "final_norm"].iter().all(|name| kind(name) == ParameterKind::Vector));
    }

    #[test]
    fn a_model_of_even_sizes_wastes_only_the_vocabulary_s_padding() {
        let shape = one_billion();
        let padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden_size;
        assert_eq!(ParameterLayout::new(&shape).elements(), shape.parameter_count() as usize + padding);
    }

    #[test]
    fn a_tied_head_is_the_embedding() {
        for (tied, shape) in [(true, tiny(true)), (false, tiny(false))] {
            let layout = ParameterLayout::new(&shape);
            let flat = Buffer::zeros(&[layout.elements()], kernels::DType::F32, &kernels::Device::Cpu).unwrap();
            let weights = layout.weights(&flat.clone().into(), Some(&flat)).unwrap();
            let address = |weight: &Weight| weight.values.address();
            assert_eq!(address(&weights.embed_tokens) == address(&weights.head), tied);
            let qkv = layout.get("layers.2.qkv").unwrap().offset;
            assert_eq!(address(&weights.blocks[2].qkv), flat.view(qkv, &[1]).unwrap().address());
        }
    }
}
