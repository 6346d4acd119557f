//! Every parameter, described in one place: name, shape, kind, initial values and the Hugging Face tensors it is made
//! of.
//!
//! [`Parameters::build`] is that place. Everything else about parameters follows from it: the layout of the
//! flat buffers, counts, operations, initial values and the files' tensors. A parameter is added there and in the
//! struct.

use std::convert::Infallible;

use crate::ModelShape;
use crate::lora::AdapterParameters;
use crate::shape::LoraShape;
use run_config::TargetModule;

/// The description of a parameter: everything that the rest of the crate knows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// `embed_tokens`, `layers.0.qkv`, `final_norm`, ...
    pub name: String,
    /// The decoder block that it is in, from 0; none outside of the blocks.
    pub layer: Option<usize>,
    /// The shape in memory; matrices are `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// The kind, which decides how the optimizer treats it.
    pub kind: ParameterKind,
    /// Its values before the first step.
    pub initial: InitialValues,
    /// Whether every token is multiplied with it, as FLOPs are counted.
    pub in_matmul: bool,
    /// The tensors on disk that its rows are. Rows of none are padding: zero, without a gradient.
    pub hugging_face: Vec<TensorRows>,
}

/// Kinds of parameters that the optimizer treats alike, in the order of the flat buffers: in a model with adapters
/// nothing else trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// The matrices of adapters. Weight decay applies.
    Adapter,
    /// The projections of the decoder blocks. Weight decay applies; `Muon` updates these.
    Projection,
    /// An untied head. Weight decay applies.
    Head,
    /// The token embedding, which a tied head is. No weight decay: it would pull the rows of rare tokens to zero
    /// between their gradients.
    Embedding,
    /// Norms and biases. No weight decay: it would pull norms away from one.
    Vector,
}

impl ParameterKind {
    /// Every kind, in the order of the flat buffers.
    pub const ALL: [Self; 5] = [Self::Adapter, Self::Projection, Self::Head, Self::Embedding, Self::Vector];
}

/// The distribution of a parameter's values before the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InitialValues {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal around zero.
    Normal {
        /// The standard deviation.
        std: f64,
    },
    /// Uniform around zero.
    Uniform {
        /// The largest magnitude.
        bound: f64,
    },
}

/// Rows of a parameter that are one tensor on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRows {
    /// The name in `transformers`, `model.layers.0.self_attn.q_proj.weight`, or for tensors of adapters in peft.
    pub name: String,
    /// The row of the parameter at which the tensor begins.
    pub first_row: usize,
    /// The tensor's rows.
    pub rows: usize,
}

impl ParameterSpec {
    /// The number of elements in memory.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements of a row: one of a vector.
    pub fn row_elements(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The number of elements on disk, where no padding is.
    pub fn stored_elements(&self) -> usize {
        self.hugging_face.iter().map(|tensor| tensor.rows).sum::<usize>() * self.row_elements()
    }

    /// A projection; `tensors` are the Hugging Face tensors that lie in it one below the other, with their rows.
    fn matrix(name: String, shape: [usize; 2], std: f64, tensors: impl IntoIterator<Item = (String, usize)>) -> Self {
        Self {
            name,
            layer: None,
            shape: shape.to_vec(),
            kind: ParameterKind::Projection,
            initial: InitialValues::Normal { std },
            in_matmul: true,
            hugging_face: stacked(tensors),
        }
    }

    /// A matrix of an adapter, which is one tensor on disk.
    fn adapter(name: String, shape: [usize; 2], initial: InitialValues, tensor: String) -> Self {
        Self {
            name,
            layer: None,
            shape: shape.to_vec(),
            kind: ParameterKind::Adapter,
            initial,
            in_matmul: true,
            hugging_face: stacked([(tensor, shape[0])]),
        }
    }

    /// A bias or the weight of a norm; `tensors` are the Hugging Face tensors that lie in it one behind the other, with
    /// their elements.
    fn vector(name: String, initial: InitialValues, tensors: impl IntoIterator<Item = (String, usize)>) -> Self {
        let hugging_face = stacked(tensors);
        Self {
            name,
            layer: None,
            shape: vec![hugging_face.iter().map(|tensor| tensor.rows).sum()],
            kind: ParameterKind::Vector,
            initial,
            in_matmul: false,
            hugging_face,
        }
    }
}

/// Tensors with their rows, one below the other.
fn stacked(tensors: impl IntoIterator<Item = (String, usize)>) -> Vec<TensorRows> {
    let mut next_row = 0;
    let place = |(name, rows)| {
        let first_row = next_row;
        next_row += rows;
        TensorRows { name, first_row, rows }
    };
    tensors.into_iter().map(place).collect()
}

/// A value for each parameter of a model: its place, its buffers, ...
#[derive(Clone, Debug)]
pub struct Parameters<T> {
    /// Token embedding `[V, D]`.
    pub embed_tokens: T,
    /// The decoder blocks' parameters.
    pub blocks: Vec<BlockParameters<T>>,
    /// Weight of the last norm `[D]`.
    pub final_norm: T,
    /// The head `[V, D]`; that of `embed_tokens` in a tied model.
    pub head: T,
}

/// A value for each parameter of one decoder block.
#[derive(Clone, Debug)]
pub struct BlockParameters<T> {
    /// Query, key and value projections, one below the other `[P, D]`.
    pub qkv: T,
    /// Their biases, one behind the other `[P]`; only in some architectures.
    pub qkv_bias: Option<T>,
    /// Attention's output projection `[D, A]`.
    pub attention_output: T,
    /// Weights of the norms of the query heads and of the key heads `[2E]`; only in some architectures.
    pub qk_norm: Option<T>,
    /// Gate and up projections, one below the other `[2I, D]`.
    pub gate_up: T,
    /// Down projection `[D, I]`.
    pub down: T,
    /// Adapters beside these projections.
    pub adapters: BlockAdapters<T>,
    /// Weight of the norm before attention `[D]`.
    pub attention_norm: T,
    /// Weight of the norm before the MLP `[D]`.
    pub mlp_norm: T,
}

/// A value for each parameter of the adapters of one block, by the projection that they are beside. There are none
/// where every weight trains.
#[derive(Clone, Debug)]
pub struct BlockAdapters<T> {
    /// Adapters of the query, key and value projections.
    pub qkv: Vec<AdapterParameters<T>>,
    /// Adapters of attention's output projection.
    pub attention_output: Vec<AdapterParameters<T>>,
    /// Adapters of the gate and up projections.
    pub gate_up: Vec<AdapterParameters<T>>,
    /// Adapters of the down projection.
    pub down: Vec<AdapterParameters<T>>,
}

impl<T: Clone> Parameters<T> {
    /// Describes every parameter, in the order of `transformers`' `named_parameters`, and keeps what `add` makes of it.
    /// The order is that of the fields below, and the one in which tensors lie in files and parameters of a kind in
    /// the flat buffers.
    pub fn build<E>(shape: &ModelShape, mut add: impl FnMut(ParameterSpec) -> Result<T, E>) -> Result<Self, E> {
        let ModelShape { hidden_size: d, padded_vocab_size: v, vocab_size, tie_embeddings, .. } = *shape;
        let table = |name: &str, tensor: &str, std| {
            ParameterSpec::matrix(name.to_owned(), [v, d], std, [(format!("{tensor}.weight"), vocab_size)])
        };
        let embed_tokens = add(ParameterSpec {
            kind: ParameterKind::Embedding,
            in_matmul: tie_embeddings,
            ..table("embed_tokens", "model.embed_tokens", shape.init_std)
        })?;
        Ok(Self {
            blocks: (0..shape.num_layers)
                .map(|layer| BlockParameters::build(shape, layer, &mut add))
                .collect::<Result<_, E>>()?,
            final_norm: add(ParameterSpec::vector(
                "final_norm".to_owned(),
                InitialValues::Ones,
                [("model.norm.weight".to_owned(), d)],
            ))?,
            head: if tie_embeddings {
                embed_tokens.clone()
            } else {
                // The logits of the first step stay of one size at any width.
                let std = shape.init_std * shape.width_ratio();
                add(ParameterSpec { kind: ParameterKind::Head, ..table("lm_head", "lm_head", std) })?
            },
            embed_tokens,
        })
    }
}

impl<T> BlockParameters<T> {
    fn build<E>(
        shape: &ModelShape,
        layer: usize,
        add: &mut impl FnMut(ParameterSpec) -> Result<T, E>,
    ) -> Result<Self, E> {
        let ModelShape { hidden_size: d, intermediate_size: i, .. } = *shape;
        let add = &mut |spec| add(ParameterSpec { layer: Some(layer), ..spec });
        // Sums over twice the inputs are of one size if their weights are smaller by sqrt(2).
        let std = shape.init_std * shape.width_ratio().sqrt();
        let heads = shape.heads();
        let (p, a, k, e) = (heads.packed_width(), heads.query_width(), heads.key_width(), heads.head_size);
        // What adds to the residual stream is scaled down, so that the stream's variance does not grow with the layers.
        let residual_std = std * (1.0 / (2.0 * shape.num_layers as f64).sqrt());
        let name = |name: &str| format!("layers.{layer}.{name}");
        let tensors = |tensors: &[(&str, usize)], what: &str| {
            let full = |&(name, rows): &(&str, usize)| (format!("model.layers.{layer}.{name}.{what}"), rows);
            tensors.iter().map(full).collect::<Vec<_>>()
        };
        let matrix = |parameter, shape, std, of: &[(&str, usize)]| {
            ParameterSpec::matrix(name(parameter), shape, std, tensors(of, "weight"))
        };
        let norm = |parameter, of: &[(&str, usize)]| {
            ParameterSpec::vector(name(parameter), InitialValues::Ones, tensors(of, "weight"))
        };
        let qkv = [("self_attn.q_proj", a), ("self_attn.k_proj", k), ("self_attn.v_proj", k)];
        let (output, down) = ([("self_attn.o_proj", d)], [("mlp.down_proj", d)]);
        let gate_up = [("mlp.gate_proj", i), ("mlp.up_proj", i)];
        let qkv_bias = || ParameterSpec::vector(name("qkv_bias"), InitialValues::Zeros, tensors(&qkv, "bias"));
        let qk_norm = || norm("qk_norm", &[("self_attn.q_norm", e), ("self_attn.k_norm", e)]);
        Ok(Self {
            qkv: add(matrix("qkv", [p, d], std, &qkv))?,
            qkv_bias: shape.architecture.has_qkv_bias().then(|| add(qkv_bias())).transpose()?,
            attention_output: add(matrix("attention_output", [d, a], residual_std, &output))?,
            qk_norm: shape.architecture.has_qk_norm().then(|| add(qk_norm())).transpose()?,
            gate_up: add(matrix("gate_up", [2 * i, d], std, &gate_up))?,
            down: add(matrix("down", [d, i], residual_std, &down))?,
            adapters: BlockAdapters {
                qkv: adapters(shape, layer, d, &qkv, add)?,
                attention_output: adapters(shape, layer, a, &output, add)?,
                gate_up: adapters(shape, layer, d, &gate_up, add)?,
                down: adapters(shape, layer, i, &down, add)?,
            },
            attention_norm: add(norm("attention_norm", &[("input_layernorm", d)]))?,
            mlp_norm: add(norm("mlp_norm", &[("post_attention_layernorm", d)]))?,
        })
    }
}

/// Adds the adapters of modules, given with their outputs, that are packed in one projection of these inputs; initial
/// values are peft's: A as `torch.nn.Linear` is, B zero.
fn adapters<T, E>(
    shape: &ModelShape,
    layer: usize,
    inputs: usize,
    modules: &[(&str, usize)],
    add: &mut impl FnMut(ParameterSpec) -> Result<T, E>,
) -> Result<Vec<AdapterParameters<T>>, E> {
    let Some(LoraShape { rank, modules: targets, .. }) = &shape.lora else { return Ok(Vec::new()) };
    let mut first_column = 0;
    let mut adapters = Vec::new();
    for &(path, outputs) in modules {
        let module = path.rsplit('.').next().and_then(|name| name.parse::<TargetModule>().ok());
        if let Some(module) = module.filter(|module| targets.contains(*module)) {
            let spec = |part: &str, shape, initial| {
                let tensor = format!("base_model.model.model.layers.{layer}.{path}.{part}.weight");
                ParameterSpec::adapter(format!("layers.{layer}.{path}.{part}"), shape, initial, tensor)
            };
            let bound = 1.0 / (inputs as f64).sqrt();
            let a = add(spec("lora_A", [*rank, inputs], InitialValues::Uniform { bound }))?;
            let b = add(spec("lora_B", [outputs, *rank], InitialValues::Zeros))?;
            adapters.push(AdapterParameters { module, first_column, a, b });
        }
        first_column += outputs;
    }
    Ok(adapters)
}

/// The specs of all parameters, in the order of [`Parameters::build`].
pub(crate) fn specs(shape: &ModelShape) -> Vec<ParameterSpec> {
    let mut specs = Vec::new();
    let Ok(_) = Parameters::build(shape, |spec| {
        specs.push(spec);
        Ok::<_, Infallible>(())
    });
    specs
}

/// The sum of a number over all parameters. Every block adds the same, so that the time does not depend on their
/// number.
fn sum(shape: &ModelShape, of: impl Fn(&ParameterSpec) -> usize) -> u64 {
    let sum_with =
        |num_layers| specs(&ModelShape { num_layers, ..shape.clone() }).iter().map(&of).sum::<usize>() as u64;
    let outside = sum_with(0);
    outside + shape.num_layers as u64 * (sum_with(1) - outside)
}

impl ModelShape {
    /// Parameters on disk: without adapters and the vocabulary's padding, a tied embedding once.
    pub fn parameter_count(&self) -> u64 {
        sum(self, |spec| if spec.kind == ParameterKind::Adapter { 0 } else { spec.stored_elements() })
    }

    /// Parameters that train: those of the adapters, or all where there are none.
    pub fn trainable_parameter_count(&self) -> u64 {
        sum(self, |spec| if self.trains(spec.kind) { spec.stored_elements() } else { 0 })
    }

    /// Whether parameters of this kind train.
    pub fn trains(&self, kind: ParameterKind) -> bool {
        self.lora.is_none() || kind == ParameterKind::Adapter
    }

    /// Floating-point operations of a training step per token: six per parameter of a matmul that trains, four per one
    /// that does not, and causal attention.
    ///
    /// `6 * N + 6 * L * A * T`: of each parameter's 6 the forward pass takes 2, the gradient of the inputs 2 and that
    /// of the weight 2; attention takes half of the full `12 * L * A * T` because a position sees only those before it
    /// (LLM.Q's count; `PaLM`, appendix B, without the half).
    pub fn flops_per_token(&self, sequence_length: usize) -> f64 {
        let attention = (self.num_layers * self.heads().query_width() * sequence_length) as f64;
        let operations = |spec: &ParameterSpec| {
            let each = if self.trains(spec.kind) { 6 } else { 4 };
            if spec.in_matmul { each * spec.stored_elements() } else { 0 }
        };
        sum(self, operations) as f64 + 6.0 * attention
    }
}
