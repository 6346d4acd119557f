//! The model written a second time with Candle's tensors in f64, differentiated by Candle's tape.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use model::ModelShape;

use crate::models::{self, Batch, plain, relative_error, tiny};

/// A model as Candle sees it: every tensor a variable.
pub struct Tape {
    shape: ModelShape,
    variables: BTreeMap<String, Var>,
}

impl Tape {
    pub fn new(shape: &ModelShape) -> Self {
        let values = models::weights_by_name(shape);
        let variable = |values: &[f32], dims: &[usize]| {
            let tensor = Tensor::from_slice(values, dims, &Device::Cpu).unwrap();
            Var::from_tensor(&tensor.to_dtype(DType::F64).unwrap()).unwrap()
        };
        let tensors = models::all_tensors(shape).into_iter();
        let variables = tensors.map(|tensor| (tensor.name.clone(), variable(&values[&tensor.name], &tensor.shape)));
        Self { shape: shape.clone(), variables: variables.collect() }
    }

    fn weight(&self, name: &str) -> &Tensor {
        self.variables[&format!("{name}.weight")].as_tensor()
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mut y = x.matmul(&self.weight(name).t()?)?;
        let adapter = |part: &str| self.variables.get(&format!("base_model.model.{name}.{part}.weight"));
        if let (Some(lora), Some(a), Some(b)) = (&self.shape.lora, adapter("lora_A"), adapter("lora_B")) {
            y = (y + (x.matmul(&a.t()?)?.matmul(&b.t()?)? * lora.scale())?)?;
        }
        match self.variables.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + self.shape.norm_epsilon)?.sqrt()?;
        x.broadcast_div(&rms)?.broadcast_mul(self.weight(name))
    }

    /// `[N, heads * E] -> [B, heads, T, E]`.
    fn split_heads(&self, x: &Tensor, batch: usize, heads: usize) -> Result<Tensor> {
        let (t, e) = (x.dim(0)? / batch, self.shape.head_size);
        x.reshape((batch, t, heads, e))?.transpose(1, 2)?.contiguous()
    }

    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (t, e) = (x.dim(2)?, self.shape.head_size);
        let angle = |t: usize, j: usize| t as f64 * self.shape.rope_theta.powf(-2.0 * (j % (e / 2)) as f64 / e as f64);
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f64> = (0..t).flat_map(|t| (0..e).map(move |j| function(angle(t, j)))).collect();
            Tensor::from_vec(values, (t, e), &Device::Cpu)
        };
        let (left, right) = (x.narrow(3, 0, e / 2)?, x.narrow(3, e / 2, e / 2)?);
        let turned = Tensor::cat(&[&right.neg()?, &left], 3)?;
        x.broadcast_mul(&table(f64::cos)?)? + turned.broadcast_mul(&table(f64::sin)?)?
    }

    fn attention(&self, x: &Tensor, layer: &str, batch: usize) -> Result<Tensor> {
        let (heads, kv_heads, e) =
            (self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_size);
        let (n, t) = (x.dim(0)?, x.dim(0)? / batch);
        let project = |name: &str, heads| self.split_heads(&self.linear(x, &format!("{layer}.{name}"))?, batch, heads);
        let norm = |x: Tensor, name: &str| {
            let has_norm = self.shape.architecture.has_qk_norm();
            if has_norm { self.norm(&x, &format!("{layer}.{name}")) } else { Ok(x) }
        };
        let q = self.rotate(&norm(project("q_proj", heads)?, "q_norm")?)?;
        let repeat = |x: Tensor| {
            let wide = x.unsqueeze(2)?.broadcast_as((batch, kv_heads, heads / kv_heads, t, e))?;
            wide.contiguous()?.reshape((batch, heads, t, e))
        };
        let k = repeat(self.rotate(&norm(project("k_proj", kv_heads)?, "k_norm")?)?)?;
        let v = repeat(project("v_proj", kv_heads)?)?;
        let future = |at: usize| if at % t > at / t { -1e30 } else { 0.0 };
        let mask = Tensor::from_vec((0..t * t).map(future).collect::<Vec<f64>>(), (t, t), &Device::Cpu)?;
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (e as f64).sqrt())?.broadcast_add(&mask)?;
        let weights = scores.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let attended = weights.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((n, heads * e))?;
        self.linear(&attended, &format!("{layer}.o_proj"))
    }

    /// `[N, vocabulary]`.
    pub fn logits(&self, inputs: &[u32], batch: usize) -> Result<Tensor> {
        let ids = Tensor::new(inputs, &Device::Cpu)?;
        let mut x = self.weight("model.embed_tokens").index_select(&ids, 0)?;
        for layer in 0..self.shape.num_layers {
            let name = format!("model.layers.{layer}");
            let normed = self.norm(&x, &format!("{name}.input_layernorm"))?;
            x = (x + self.attention(&normed, &format!("{name}.self_attn"), batch)?)?;
            let normed = self.norm(&x, &format!("{name}.post_attention_layernorm"))?;
            let gate = self.linear(&normed, &format!("{name}.mlp.gate_proj"))?.silu()?;
            let product = (gate * self.linear(&normed, &format!("{name}.mlp.up_proj"))?)?;
            x = (x + self.linear(&product, &format!("{name}.mlp.down_proj"))?)?;
        }
        let head = if self.shape.tie_embeddings { "model.embed_tokens" } else { "lm_head" };
        self.linear(&self.norm(&x, "model.norm")?, head)
    }

    /// Mean loss over the targets, and its gradients by name.
    pub fn differentiate(&self, data: &Batch, batch: usize) -> Result<(f64, BTreeMap<String, Vec<f64>>)> {
        let logits = self.logits(&data.inputs, batch)?;
        let ids: Vec<u32> = data.targets.iter().map(|&target| target.max(0) as u32).collect();
        let counted: Vec<f64> = data.targets.iter().map(|&target| f64::from(u8::from(target >= 0))).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(1)?;
        let losses = (logits.exp()?.sum(1)?.log()? - logits.gather(&ids, 1)?.squeeze(1)?)?;
        let loss = ((losses * Tensor::new(counted, &Device::Cpu)?)?.sum_all()? / data.target_count() as f64)?;
        let gradients = loss.backward()?;
        let gradient = |(name, variable): (&String, &Var)| -> Result<(String, Vec<f64>)> {
            let gradient = gradients.get(variable).expect("every weight takes part in the loss");
            Ok((name.clone(), gradient.flatten_all()?.to_vec1()?))
        };
        Ok((loss.to_scalar()?, self.variables.iter().map(gradient).collect::<Result<_>>()?))
    }
}

#[test]
fn loss_and_every_gradient_agree_with_candle_s_autograd() {
    let grouped = |kv_heads, tied| ModelShape { num_key_value_heads: kv_heads, ..tiny(tied) };
    let few = [(grouped(4, true), 1, 1), (grouped(1, false), 4, 7)];
    for (shape, batch, t) in models::variants().map(|shape| (shape, 3, 13)).into_iter().chain(few) {
        let data = Batch::drawn(&shape, batch * t, if t > 1 { 0.2 } else { 0.0 }, 11);
        let (expected, gradients) = Tape::new(&shape).differentiate(&data, batch).unwrap();
        let mut decoder = models::decoder(&shape, &plain(batch, t));
        data.train(&mut decoder, 1.0 / data.target_count() as f32);
        assert!((f64::from(models::loss(&decoder)) / expected - 1.0).abs() < 1e-6);
        let ours = models::by_name(&shape, decoder.gradients());
        assert_eq!(ours.len(), gradients.len());
        for (name, expected) in &gradients {
            if expected.iter().all(|&value| value.abs() < 1e-15) {
                // One position attends to itself only, whatever its query and key are.
                assert!(t == 1 && ours[name].iter().all(|&value| value.abs() < 1e-7), "{name}");
                continue;
            }
            let error = relative_error(&ours[name], expected);
            assert!(error <= 1e-5, "{name}, {:?}: {error:.1e}", shape.architecture);
        }
    }
}
