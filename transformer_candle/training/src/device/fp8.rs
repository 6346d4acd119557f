//! Which fp8 matmuls a run has on a device.

use kernels::{
    Device,
    cuda::{Gpu, limits},
    fp8::ScaleBlock,
};
use run_config::{Fp8Recipe, Precision, RunConfig};

use super::{Refusal, sizes};
use crate::{engine::model_shape, error::Result, memory_plan::GpuSpec};

/// What decides which fp8 matmuls a GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuVersions {
    /// The compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The version of its cuBLAS, major and minor.
    pub cublas: (u32, u32),
}

/// The cuBLAS that a GPU which is not here is planned with.
const PLANNED_CUBLAS: (u32, u32) = (13, 0);

impl From<&Gpu> for GpuVersions {
    fn from(gpu: &Gpu) -> Self {
        Self { compute_capability: gpu.compute_capability, cublas: gpu.cublas }
    }
}

impl From<&GpuSpec> for GpuVersions {
    fn from(gpu: &GpuSpec) -> Self {
        Self { compute_capability: gpu.compute_capability, cublas: PLANNED_CUBLAS }
    }
}

impl GpuVersions {
    fn fp8_blocks(self) -> &'static [ScaleBlock] {
        limits::fp8_blocks(self.compute_capability, self.cublas)
    }
}

/// Returns the elements that share a scale.
pub(crate) fn scale_block(recipe: Fp8Recipe) -> ScaleBlock {
    match recipe {
        Fp8Recipe::Tensorwise => ScaleBlock::Tensor,
        Fp8Recipe::Blockwise => ScaleBlock::Square128,
        Fp8Recipe::Auto | Fp8Recipe::Mxfp8 => ScaleBlock::Square32,
    }
}

fn recipe(block: ScaleBlock) -> Fp8Recipe {
    match block {
        ScaleBlock::Tensor => Fp8Recipe::Tensorwise,
        ScaleBlock::Square128 => Fp8Recipe::Blockwise,
        ScaleBlock::Square32 => Fp8Recipe::Mxfp8,
    }
}

/// Returns the recipes that a device has, the one of `auto` first; of a CPU, which has all, that one only.
pub fn fp8_recipes(device: &Device) -> Vec<Fp8Recipe> {
    match device {
        Device::Cpu => vec![Fp8Recipe::Mxfp8],
        Device::Cuda(gpu) => gpu.gpu().fp8_blocks().iter().copied().map(recipe).collect(),
    }
}

/// Replaces `runtime.fp8_recipe: auto` by that of a GPU, or of a CPU if there is none. Returns a note of what it is on a
/// GPU.
pub(crate) fn resolve_recipe(config: &mut RunConfig, gpu: Option<GpuVersions>) -> Option<String> {
    let runtime = &mut config.runtime;
    if runtime.precision != Precision::Fp8 || runtime.fp8_recipe != Fp8Recipe::Auto {
        return None;
    }
    let block = gpu.map_or(Some(&ScaleBlock::Square32), |gpu| gpu.fp8_blocks().first())?;
    runtime.fp8_recipe = recipe(*block);
    gpu.map(|_| format!("runtime.fp8_recipe is {} on this GPU", name(runtime.fp8_recipe)))
}

/// A recipe as configs spell it.
fn name(recipe: Fp8Recipe) -> String {
    serde_json::to_value(recipe).ok().and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default()
}

/// Returns why a GPU does not train a config's run in fp8; none where it does, and without fp8.
pub(super) fn refusal(config: &RunConfig, gpu: GpuVersions) -> Result<Option<Refusal>> {
    let refused = |clause, way_out| Ok(Some(Refusal { clause, way_out, is_for_cpu: false }));
    let shape = model_shape(config)?;
    if config.runtime.precision != Precision::Fp8 {
        let clause = shape.has_fp8_base().then(|| limits::fp8_refusal(&sizes(&shape, 0), 0)).flatten();
        return clause.map_or(Ok(None), |clause| refused(clause, "Use `--override lora.base_precision=auto`"));
    }
    let GpuVersions { compute_capability: (major, minor), cublas } = gpu;
    let (blocks, chosen) = (gpu.fp8_blocks(), config.runtime.fp8_recipe);
    if blocks.is_empty() {
        let clause = format!(
            "of compute capability {major}.{minor} has no fp8 matmuls (runtime.precision): they begin with 8.9, as of RTX \
             4090, H100 and RTX 5090"
        );
        return refused(clause, "Use `--precision bf16`");
    }
    if chosen != Fp8Recipe::Auto && !blocks.contains(&scale_block(chosen)) {
        let recipes: Vec<String> = blocks.iter().map(|block| name(recipe(*block))).collect();
        let clause = format!(
            "of compute capability {major}.{minor} with cuBLAS {}.{} has fp8 matmuls that are {}, and runtime.fp8_recipe is {}",
            cublas.0,
            cublas.1,
            recipes.join(" or "),
            name(chosen)
        );
        return refused(clause, "Use `--override runtime.fp8_recipe=auto`");
    }
    for stage in config.stage_configs() {
        let length = stage.data.sequence_length;
        if let Some(clause) = limits::fp8_refusal(&sizes(&shape, length), length) {
            return refused(clause, "Change it, or use `--precision bf16`");
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use run_config::BasePrecision;

    use super::*;
    use crate::memory_plan::GPUS;

    fn config(recipe: Fp8Recipe) -> RunConfig {
        let mut config = RunConfig::default();
        config.model.vocab_size = Some(32_000);
        (config.runtime.precision, config.runtime.fp8_recipe) = (Precision::Fp8, recipe);
        config
    }

    fn versions(key: &str) -> GpuVersions {
        GPUS.iter().find(|gpu| gpu.key == key).unwrap().into()
    }

    #[test]
    fn auto_is_what_the_device_has() {
        use Fp8Recipe::{Blockwise, Mxfp8, Tensorwise};
        let resolved = |gpu| {
            let mut config = config(Fp8Recipe::Auto);
            resolve_recipe(&mut config, gpu);
            config.runtime.fp8_recipe
        };
        let expected = [("rtx5090", Mxfp8), ("rtx4090", Tensorwise), ("h100", Blockwise), ("h200", Blockwise)];
        for (key, recipe) in expected {
            assert_eq!(resolved(Some(versions(key))), recipe, "{key}");
            assert_eq!(refusal(&config(recipe), versions(key)).unwrap(), None, "{key}");
            assert_eq!(refusal(&config(Tensorwise), versions(key)).unwrap(), None, "{key}");
        }
        assert_eq!(resolved(None), Mxfp8);
        let old = GpuVersions { cublas: (12, 8), ..versions("h100") };
        assert_eq!(resolved(Some(old)), Tensorwise);
    }

    #[test]
    fn a_gpu_without_the_matmuls_is_refused_with_the_way_out() {
        let refused = |config: &RunConfig, gpu| refusal(config, gpu).unwrap().unwrap();
        for key in ["rtx3090", "a100-40", "a100-80"] {
            let Refusal { clause, way_out, .. } = refused(&config(Fp8Recipe::Auto), versions(key));
            assert!(clause.contains("has no fp8 matmuls"), "{clause}");
            assert_eq!(way_out, "Use `--precision bf16`");
        }
        let Refusal { clause, way_out, .. } = refused(&config(Fp8Recipe::Mxfp8), versions("h100"));
        assert_eq!(
            clause,
            "of compute capability 9.0 with cuBLAS 13.0 has fp8 matmuls that are blockwise or tensorwise, and \
             runtime.fp8_recipe is mxfp8"
        );
        assert_eq!(way_out, "Use `--override runtime.fp8_recipe=auto`");
        let mut odd = config(Fp8Recipe::Auto);
        odd.data.sequence_length = 100;
        assert!(refused(&odd, versions("rtx5090")).clause.ends_with("data.sequence_length is 100"));
    }

    #[test]
    fn any_gpu_holds_a_base_in_fp8_whose_rows_it_loads() {
        let mut config = config(Fp8Recipe::Auto);
        config.runtime.precision = Precision::Bf16;
        (config.lora.rank, config.lora.base_precision) = (Some(8), BasePrecision::Fp8);
        assert_eq!(refusal(&config, versions("rtx3090")).unwrap(), None);
        let model = &mut config.model;
        (model.num_attention_heads, model.num_key_value_heads, model.head_dim) = (3, 1, Some(40));
        let Refusal { clause, way_out, .. } = refusal(&config, versions("rtx3090")).unwrap().unwrap();
        assert!(clause.ends_with("the query heads' width is 120"), "{clause}");
        assert_eq!(way_out, "Use `--override lora.base_precision=auto`");
        config.lora.base_precision = BasePrecision::Auto;
        assert_eq!(refusal(&config, versions("rtx3090")).unwrap(), None);
    }
}
