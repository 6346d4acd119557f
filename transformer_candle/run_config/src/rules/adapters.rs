//! Rules between the keys of adapters and others.

use super::Rules;
use crate::error::Problem;
use crate::{Algorithm, BasePrecision, LoraConfig, Precision};

impl Rules<'_> {
    pub(super) fn adapters_are_complete(&mut self) {
        self.adapters_have_a_rank();
        self.adapters_have_a_base();
        self.adapters_train_with_adamw();
        self.adapters_have_modules();
        self.base_in_fp8_is_multiplied();
    }

    fn adapters_have_a_rank(&mut self) {
        let (lora, default) = (&self.config.lora, LoraConfig::default());
        let keys = [
            ("alpha", lora.alpha != default.alpha),
            ("dropout", lora.dropout > default.dropout),
            ("target_modules", lora.target_modules != default.target_modules),
            ("rslora", lora.rslora != default.rslora),
            ("base_precision", lora.base_precision != default.base_precision),
            ("init_from", lora.init_from != default.init_from),
        ];
        let Some((key, _)) = keys.iter().find(|(_, is_given)| *is_given).filter(|_| lora.rank.is_none()) else {
            return;
        };
        let problem = Problem::new("lora.rank", format!("is missing, though lora.{key} is given"))
            .suggest("16 is usual; without adapters remove the section");
        self.report(&["lora.rank"], problem);
    }

    fn adapters_have_a_base(&mut self) {
        if self.config.lora.rank.is_none() || self.config.model.init_from.is_some() {
            return;
        }
        let problem = Problem::new("model.init_from", "is missing: adapters train beside the weights of a model")
            .suggest("name the folder of a pretrained model, or remove lora.rank");
        self.report(&["lora.rank", "model.init_from"], problem);
    }

    fn adapters_train_with_adamw(&mut self) {
        if self.config.lora.rank.is_none() || self.config.optimizer.algorithm == Algorithm::AdamW {
            return;
        }
        let problem = Problem::new("optimizer.algorithm", "is muon, but adapters (lora.rank) train with adamw")
            .suggest("remove the key");
        self.report(&["lora.rank", "optimizer.algorithm"], problem);
    }

    fn base_in_fp8_is_multiplied(&mut self) {
        if self.config.lora.base_precision == BasePrecision::Auto || self.config.runtime.precision != Precision::Fp32 {
            return;
        }
        let problem = Problem::new("lora.base_precision", "is fp8, but runtime.precision is fp32")
            .suggest("use runtime.precision bf16 or fp8");
        self.report(&["lora.base_precision", "runtime.precision"], problem);
    }

    fn adapters_have_modules(&mut self) {
        if !self.config.lora.target_modules.modules().is_empty() {
            return;
        }
        let problem = Problem::new("lora.target_modules", "names no module").suggest("write all-linear");
        self.report(&["lora.target_modules"], problem);
    }
}
