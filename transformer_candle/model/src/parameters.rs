//! Every parameter in memory: its name, its shape, and where it lies in the flat buffers.
//!
//! Weights, gradients and optimizer state are one flat buffer each with the same layout, so that clipping and `AdamW` are one
//! pass over each. Parameters that weight decay applies to come first: the projections and an untied head. Norms and the
//! embedding follow without decay (a tied head is the embedding): decay would pull norms away from one, and rows of rare
//! tokens to zero between their gradients.

use kernels::Buffer;

use crate::{ModelShape, Result};

/// Every parameter begins at a multiple of this many elements, so that its first byte is aligned for vector loads of any
/// element type. The elements in between are zero, get no gradient, and stay zero.
const ALIGNMENT: usize = 64;

/// One parameter in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// `embed_tokens`, `layers.0.qkv`, `final_norm`, ...
    pub name: String,
    /// Matrices are `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// First element in the flat buffers.
    pub offset: usize,
    /// Whether weight decay applies.
    pub decay: bool,
}

impl Parameter {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The parameters of a model in the order of the flat buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLayout {
    parameters: Vec<Parameter>,
    num_layers: usize,
    decayed_elements: usize,
    elements: usize,
}

impl ParameterLayout {
    /// The layout of a model of this shape.
    pub fn new(shape: &ModelShape) -> Self {
        let ModelShape { hidden_size: d, intermediate_size: i, padded_vocab_size: v, .. } = *shape;
        let heads = shape.heads();
        let mut layout =
            Self { parameters: Vec::new(), num_layers: shape.num_layers, decayed_elements: 0, elements: 0 };
        for layer in 0..shape.num_layers {
            layout.add(format!("layers.{layer}.qkv"), &[heads.packed_width(), d], true);
            layout.add(format!("layers.{layer}.attention_output"), &[d, heads.query_width()], true);
            layout.add(format!("layers.{layer}.gate_up"), &[2 * i, d], true);
            layout.add(format!("layers.{layer}.down"), &[d, i], true);
        }
        if !shape.tie_embeddings {
            layout.add("lm_head".to_owned(), &[v, d], true);
        }
        layout.decayed_elements = layout.elements;
        layout.add("embed_tokens".to_owned(), &[v, d], false);
        for layer in 0..shape.num_layers {
            layout.add(format!("layers.{layer}.attention_norm"), &[d], false);
            layout.add(format!("layers.{layer}.mlp_norm"), &[d], false);
        }
        layout.add("final_norm".to_owned(), &[d], false);
        layout
    }

    fn add(&mut self, name: String, shape: &[usize], decay: bool) {
        let parameter = Parameter { name, shape: shape.to_vec(), offset: self.elements, decay };
        self.elements += parameter.elements().next_multiple_of(ALIGNMENT);
        self.parameters.push(parameter);
    }

    /// Every parameter, in the order of the flat buffers.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|parameter| parameter.name == name)
    }

    /// The parameter of a name that [`ParameterLayout::new`] adds.
    pub(crate) fn known(&self, name: &str) -> &Parameter {
        self.get(name).expect("the layout has every parameter of the model")
    }

    /// Elements of a flat buffer, the few between parameters included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements at the front of a flat buffer that weight decay applies to.
    pub fn decayed_elements(&self) -> usize {
        self.decayed_elements
    }
}

/// A flat buffer with a view of every parameter. Serves weights and gradients alike.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// The whole buffer.
    pub flat: Buffer,
    /// Token embedding `[V, D]`.
    pub embed_tokens: Buffer,
    /// The decoder blocks' parameters.
    pub blocks: Vec<BlockParameters>,
    /// Weight of the last norm `[D]`.
    pub final_norm: Buffer,
    /// The head `[V, D]`; the same memory as `embed_tokens` in a tied model.
    pub head: Buffer,
}

/// The parameters of one decoder block.
#[derive(Clone, Debug)]
pub struct BlockParameters {
    /// Weight of the norm before attention `[D]`.
    pub attention_norm: Buffer,
    /// Query, key and value projections, one below the other `[P, D]`.
    pub qkv: Buffer,
    /// Attention's output projection `[D, A]`.
    pub attention_output: Buffer,
    /// Weight of the norm before the feed-forward part `[D]`.
    pub mlp_norm: Buffer,
    /// Gate and up projections, one below the other `[2I, D]`.
    pub gate_up: Buffer,
    /// Down projection `[D, I]`.
    pub down: Buffer,
}

impl Parameters {
    /// Views of a flat buffer that was planned with `layout.elements()` elements.
    pub fn over(layout: &ParameterLayout, flat: Buffer) -> Result<Self> {
        let view = |name: &str| -> Result<Buffer> {
            let parameter = layout.known(name);
            Ok(flat.view(parameter.offset, &parameter.shape)?)
        };
        let block = |layer: usize| -> Result<BlockParameters> {
            let view = |name: &str| view(&format!("layers.{layer}.{name}"));
            Ok(BlockParameters {
                attention_norm: view("attention_norm")?,
                qkv: view("qkv")?,
                attention_output: view("attention_output")?,
                mlp_norm: view("mlp_norm")?,
                gate_up: view("gate_up")?,
                down: view("down")?,
            })
        };
        let blocks = (0..layout.num_layers).map(block).collect::<Result<_>>()?;
        let head = if layout.get("lm_head").is_some() { "lm_head" } else { "embed_tokens" };
        Ok(Self {
            embed_tokens: view("embed_tokens")?,
            blocks,
            final_norm: view("final_norm")?,
            head: view(head)?,
            flat,
        })
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
            for parameter in layout.parameters() {
                assert!(parameter.offset >= end && parameter.offset % ALIGNMENT == 0, "{}", parameter.name);
                assert_eq!(parameter.decay, parameter.offset < layout.decayed_elements(), "{}", parameter.name);
                end = parameter.offset + parameter.elements();
            }
            assert!(end <= layout.elements());
            assert_eq!(layout.get("lm_head").is_some(), !tied);
        }
    }

    #[test]
    fn norms_and_embeddings_are_not_decayed() {
        let layout = ParameterLayout::new(&tiny(false));
        let decayed = |name: &str| layout.get(name).unwrap().decay;
        assert!(decayed("lm_head") && decayed("layers.2.down") && decayed("layers.0.qkv"));
        assert!(!decayed("embed_tokens") && !decayed("layers.1.mlp_norm") && !decayed("final_norm"));
    }

    #[test]
    fn a_model_of_even_sizes_wastes_only_the_vocabulary_s_padding() {
        let shape = one_billion();
        let padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden_size;
        assert_eq!(ParameterLayout::new(&shape).elements(), shape.parameter_count() as usize + padding);
    }
}
