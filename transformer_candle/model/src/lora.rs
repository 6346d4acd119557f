//! Low-rank adapters beside the frozen projections of a block, forward beside backward.

use kernels::dropout::{self, Dropout};
use kernels::memory::{Arena, Category};
use kernels::{Buffer, DType, DeviceKind, Upload, WriteMode, linear, lora};
use run_config::TargetModule;

use crate::activations::ActivationSettings;
use crate::shape::LoraShape;
use crate::weight::Weight;
use crate::{Error, ModelShape, Result};

/// A value for each parameter of a module's adapter: its place, its buffers, ...
#[derive(Clone, Debug)]
pub struct AdapterParameters<T> {
    /// The module that it belongs to.
    pub module: TargetModule,
    /// First column of the module's outputs among those of the packed projection.
    pub first_column: usize,
    /// The matrix A, applied to the module's inputs: `lora_A` `[R, I]`.
    pub a: T,
    /// The matrix B, which gives the module's outputs: `lora_B` `[O, R]`.
    pub b: T,
}

/// The key of dropout's masks on the device: kernels read it there, as a CUDA graph replays its arguments unchanged.
#[derive(Debug)]
pub struct DropoutKey {
    upload: Upload<u32>,
    /// The key that the device holds; None before the first.
    device_key: Option<dropout::Key>,
}

impl DropoutKey {
    /// Writes the key for the passes after this; on a GPU nothing is waited for.
    pub(crate) fn write(&mut self, key: dropout::Key) -> Result<()> {
        if self.device_key != Some(key) {
            self.upload.stage()?.copy_from_slice(&key.to_words());
            self.upload.send()?;
            self.upload.receive()?;
            self.device_key = Some(key);
        }
        Ok(())
    }
}

/// Makes the adapters of a linear map of one block from their parameters.
pub(crate) type MakeAdapters<'a> = &'a dyn Fn(&[AdapterParameters<Weight>]) -> Result<Vec<Adapter>>;

/// The scratch buffers that all adapters share.
pub(crate) struct AdapterBuffers {
    scale: f32,
    /// `s x A^T`.
    projected_NR: Buffer,
    /// The gradient of x A^T, where there is a backward pass.
    dprojected_NR: Option<Buffer>,
    /// None without training or dropout.
    dropout: Option<DropoutBuffers>,
}

/// The buffers of dropout.
struct DropoutBuffers {
    probability: f64,
    /// See [`dropout::Key`].
    key: Buffer,
    /// Staging buffer of the key's upload; None on a CPU.
    key_staging: Option<Buffer>,
    /// The inputs of an adapter without those dropped; in the backward pass their gradient. For the widest inputs.
    dropped: Buffer,
}

impl AdapterBuffers {
    /// Takes the buffers, if the model has adapters.
    pub(crate) fn take(shape: &ModelShape, settings: &ActivationSettings, arena: &mut Arena) -> Option<Self> {
        let &ActivationSettings { batch, sequence_length, dtype, training, device, .. } = settings;
        let (tokens, lora) = (batch * sequence_length, shape.lora.as_ref()?);
        let mut take = |name: &str, width| arena.take(name, Category::Scratch, dtype, &[tokens, width]);
        let projected_NR = take("lora.projected", lora.rank);
        let dprojected_NR = training.then(|| take("lora.projected_gradient", lora.rank));
        let widest = shape.hidden_size.max(shape.heads().query_width()).max(shape.intermediate_size);
        let dropped = (training && lora.dropout > 0.0).then(|| take("lora.dropped", widest));
        let dropout = dropped.map(|dropped| {
            let mut take = |name| arena.take(name, Category::Batch, DType::U32, &[dropout::KEY_ELEMENTS]);
            let key = take("lora.dropout_key");
            let key_staging = (device == DeviceKind::Cuda).then(|| take("lora.dropout_key.staging"));
            DropoutBuffers { probability: lora.dropout, key, key_staging, dropped }
        });
        Some(Self { scale: lora.scale() as f32, projected_NR, dprojected_NR, dropout })
    }

    /// The key from which the masks of dropout are computed; None without dropout.
    pub(crate) fn dropout_key(&self) -> Result<Option<DropoutKey>> {
        let key = |DropoutBuffers { key, key_staging, .. }: &DropoutBuffers| {
            Ok(DropoutKey { upload: Upload::new(key.clone(), key_staging.clone())?, device_key: None })
        };
        self.dropout.as_ref().map(key).transpose()
    }

    /// The adapters of one linear map of a block.
    pub(crate) fn adapters(&self, layer: usize, parameters: &[AdapterParameters<Weight>]) -> Result<Vec<Adapter>> {
        parameters.iter().map(|parameters| self.adapter(layer, parameters)).collect()
    }

    fn adapter(&self, layer: usize, parameters: &AdapterParameters<Weight>) -> Result<Adapter> {
        let AdapterParameters { module, first_column, a, b } = parameters;
        let inputs = a.values.shape()[1];
        let dropout = |DropoutBuffers { probability, key, dropped, .. }: &DropoutBuffers| -> Result<_> {
            let module = (layer * TargetModule::ALL.len() + *module as usize) as u64;
            Ok(AdapterDropout {
                dropout: Dropout { probability: *probability, module },
                key: key.clone(),
                dropped_NI: dropped.view(0, &[dropped.shape()[0], inputs])?,
            })
        };
        Ok(Adapter {
            a_RI: a.clone(),
            b_OR: b.clone(),
            first_column: *first_column,
            scale: self.scale,
            projected_NR: self.projected_NR.clone(),
            dprojected_NR: self.dprojected_NR.clone(),
            dropout: self.dropout.as_ref().map(dropout).transpose()?,
        })
    }
}

/// The adapter of one module: adds `scale (x A^T) B^T` to the module's columns of a linear map's outputs.
///
/// The input times A is not kept for the backward pass but computed again: it takes 1/O of the module's own GEMM.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    a_RI: Weight,
    b_OR: Weight,
    first_column: usize,
    scale: f32,
    /// Shared with every other adapter.
    projected_NR: Buffer,
    dprojected_NR: Option<Buffer>,
    /// Dropout of the inputs; None without dropout.
    dropout: Option<AdapterDropout>,
}

/// The dropout of an adapter's inputs.
#[derive(Clone, Debug)]
struct AdapterDropout {
    dropout: Dropout,
    key: Buffer,
    /// Shared with every other adapter.
    dropped_NI: Buffer,
}

impl AdapterDropout {
    /// Returns the inputs without those dropped.
    fn forward(&mut self, x_NI: &Buffer) -> Result<&Buffer> {
        dropout::forward(x_NI, &self.key, self.dropout, &mut self.dropped_NI)?;
        Ok(&self.dropped_NI)
    }
}

impl Adapter {
    /// Adds to the outputs.
    pub(crate) fn forward(&mut self, x_NI: &Buffer, y_NP: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        let Self { a_RI, b_OR, first_column, scale, projected_NR, dropout, .. } = self;
        let x_NI = dropout.as_mut().map_or(Ok(x_NI), |dropout| dropout.forward(x_NI))?;
        lora::project(x_NI, &a_RI.values, *scale, projected_NR, workspace)?;
        Ok(lora::expand(projected_NR, &b_OR.values, y_NP, *first_column, workspace)?)
    }

    /// Adds to the gradient of the inputs.
    pub(crate) fn backward_input(&mut self, dy_NP: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        self.project_gradient(dy_NP, workspace)?;
        let Self { a_RI, dprojected_NR, dropout, .. } = self;
        let dprojected_NR = dprojected_NR.as_ref().ok_or(Error::EvaluationOnly)?;
        let Some(AdapterDropout { dropout, key, dropped_NI: ddropped_NI }) = dropout else {
            return Ok(lora::backward_input(dprojected_NR, &a_RI.values, dx_NI, workspace)?);
        };
        linear::backward_input(dprojected_NR, &a_RI.values, ddropped_NI, workspace)?;
        Ok(dropout::backward(ddropped_NI, key, *dropout, dx_NI)?)
    }

    /// Writes the gradients of A and B, or adds to them.
    pub(crate) fn backward_weight(
        &mut self,
        dy_NP: &Buffer,
        x_NI: &Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        self.project_gradient(dy_NP, workspace)?;
        let Self { a_RI, b_OR, first_column, scale, projected_NR, dprojected_NR, dropout } = self;
        let x_NI = dropout.as_mut().map_or(Ok(x_NI), |dropout| dropout.forward(x_NI))?;
        let (a_RI, da_RI) = a_RI.with_gradient();
        let (Some(da_RI), Some(db_OR), Some(dprojected_NR)) = (da_RI, &mut b_OR.gradient, dprojected_NR) else {
            return Err(Error::EvaluationOnly);
        };
        linear::backward_weight(dprojected_NR, x_NI, da_RI, write_mode, workspace)?;
        lora::project(x_NI, a_RI, *scale, projected_NR, workspace)?;
        Ok(lora::backward_b(dy_NP, *first_column, projected_NR, db_OR, write_mode, workspace)?)
    }

    /// Computes the gradient of `x A^T`, from which those of A and of the inputs follow.
    fn project_gradient(&mut self, dy_NP: &Buffer, workspace: &mut Buffer) -> Result<()> {
        let Self { b_OR, first_column, scale, dprojected_NR, .. } = self;
        let dprojected_NR = dprojected_NR.as_mut().ok_or(Error::EvaluationOnly)?;
        Ok(lora::backward_expand(dy_NP, *first_column, &b_OR.values, *scale, dprojected_NR, workspace)?)
    }
}

/// Elements of workspace for the adapter of a module of these inputs and outputs.
pub(crate) fn workspace_elements(
    shape: &ModelShape,
    settings: &ActivationSettings,
    [inputs, outputs]: [usize; 2],
) -> usize {
    let n = settings.batch * settings.sequence_length;
    let of = |lora: &LoraShape| lora::workspace_elements(n, inputs, lora.rank, outputs, settings.device);
    shape.lora.as_ref().map_or(0, of)
}
