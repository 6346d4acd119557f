//! Rules between keys: heads divide the width, the warm-up ends before training does, and so on.

mod adapters;

use std::collections::BTreeSet;

use crate::check::Findings;
use crate::error::Problem;
use crate::fill::near_divisor;
use crate::scheduler::ScheduleStrategy;
use crate::tokenizer::SpecialTokens;
use crate::{BatchSize, DataFormat, Fp8Recipe, Packing, Precision, RunConfig, TimeSpan, stages};

/// Checks every rule whose keys were themselves valid.
pub(crate) fn check(config: &RunConfig, findings: &mut Findings) {
    let mut rules = Rules { config, findings };
    rules.heads_divide_width();
    rules.head_size_is_even();
    rules.groups_divide_heads();
    rules.rope_frequencies_in_order();
    rules.sequence_fits_positions();
    rules.vocab_and_merges_together();
    rules.special_tokens_differ();
    rules.mixture_stands_alone();
    rules.components_have_one_source();
    rules.packing_fits_format();
    rules.chat_keys_need_chat();
    rules.samples_take_time();
    rules.virtual_shards_divide_steps();
    rules.patience_needs_evaluations();
    rules.one_length();
    rules.epochs_are_constant();
    rules.warmup_ends();
    rules.decay_fits();
    rules.rates_in_order();
    rules.transferred_models_are_untied();
    rules.batch_warmup_starts_small();
    rules.adapters_are_complete();
    rules.fp8_recipe_needs_fp8();
    stages::check(config, findings);
}

struct Rules<'a> {
    config: &'a RunConfig,
    findings: &'a mut Findings,
}

impl Rules<'_> {
    /// Reports a broken rule, unless the value of one of its keys was refused already.
    fn report(&mut self, keys: &[&str], problem: Problem) {
        if !keys.iter().any(|key| self.findings.rejected.contains(*key)) {
            self.findings.problems.push(problem);
        }
    }

    fn heads_divide_width(&mut self) {
        let (width, heads) = (self.config.model.hidden_size, self.config.model.num_attention_heads);
        if self.config.model.head_dim.is_some() || width.is_multiple_of(heads) {
            return;
        }
        let even = (1..=width / 2).filter(|count| width.is_multiple_of(2 * count));
        let near = even.min_by_key(|count| count.abs_diff(heads));
        let message = format!("is {heads}, which does not divide model.hidden_size {width}");
        let problem = Problem::new("model.num_attention_heads", message)
            .suggest(near.map_or("choose an even width".to_owned(), |near| format!("{near} would")));
        self.report(&["model.hidden_size", "model.num_attention_heads"], problem);
        self.findings.rejected.insert("model.num_attention_heads".to_owned());
    }

    fn head_size_is_even(&mut self) {
        if let Some(size) = self.config.model.head_dim {
            if !size.is_multiple_of(2) {
                let message = format!("is {size}, which is odd, but rotary positions turn pairs");
                let problem = Problem::new("model.head_dim", message).suggest("choose an even size, best 64 or 128");
                self.report(&["model.head_dim"], problem);
            }
            return;
        }
        let (width, heads) = (self.config.model.hidden_size, self.config.model.num_attention_heads);
        if !width.is_multiple_of(heads) || (width / heads).is_multiple_of(2) {
            return;
        }
        let message = format!(
            "gives a head size of {width} / {heads} = {}, which is odd, but rotary positions turn pairs",
            width / heads
        );
        let problem = Problem::new("model.hidden_size", message).suggest("choose an even size, best 64 or 128");
        self.report(&["model.hidden_size", "model.num_attention_heads"], problem);
    }

    fn groups_divide_heads(&mut self) {
        let (heads, groups) = (self.config.model.num_attention_heads, self.config.model.num_key_value_heads);
        if heads.is_multiple_of(groups) {
            return;
        }
        let message = format!("is {groups}, which does not divide model.num_attention_heads {heads}");
        let problem = Problem::new("model.num_key_value_heads", message)
            .suggest(format!("{} would", near_divisor(heads, groups)));
        self.report(&["model.num_attention_heads", "model.num_key_value_heads"], problem);
    }

    fn rope_frequencies_in_order(&mut self) {
        let scaling = &self.config.model.rope_scaling;
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        if low < high {
            return;
        }
        let keys = ["model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"];
        let problem = Problem::new(keys[0], format!("is {low}, not less than high_freq_factor {high}"));
        self.report(&keys, problem.suggest("lower it"));
    }

    fn sequence_fits_positions(&mut self) {
        let (sequence, positions) = (self.config.data.sequence_length, self.config.model.max_position_embeddings);
        // With stages each stage's length is checked instead.
        if sequence <= positions || self.config.stages.is_some() {
            return;
        }
        let message = format!("is {sequence}, more than model.max_position_embeddings {positions}");
        let problem = Problem::new("data.sequence_length", message).suggest("raise the one or lower the other");
        self.report(&["data.sequence_length", "model.max_position_embeddings"], problem);
    }

    fn vocab_and_merges_together(&mut self) {
        let (present_key, missing_key) = match (&self.config.tokenizer.vocab, &self.config.tokenizer.merges) {
            (Some(_), None) => ("vocab", "merges"),
            (None, Some(_)) => ("merges", "vocab"),
            _ => return,
        };
        let problem = Problem::new(
            format!("tokenizer.{missing_key}"),
            format!("is missing, though tokenizer.{present_key} is given"),
        )
        .suggest("give both or neither; tokenizer.tokenizer_json alone is enough");
        self.report(&["tokenizer.vocab", "tokenizer.merges"], problem);
    }

    fn special_tokens_differ(&mut self) {
        let Some(SpecialTokens::List(tokens)) = &self.config.tokenizer.special_tokens else {
            return;
        };
        let mut distinct = BTreeSet::new();
        if let Some(duplicate) = tokens.iter().find(|token| !distinct.insert(token.as_str())) {
            let problem =
                Problem::new("tokenizer.special_tokens", format!("names {duplicate:?} twice")).suggest("remove one");
            self.report(&["tokenizer.special_tokens"], problem);
        }
    }

    fn mixture_stands_alone(&mut self) {
        let (data, scheduler) = (&self.config.data, &self.config.scheduler);
        if data.mixture.is_empty() {
            return;
        }
        let shards = (!data.train_shards.is_empty()).then(|| {
            Problem::new("data.train_shards", "names files to train on, but so does data.mixture")
                .suggest("remove it, or put the files into the mixture: {shards: [...], weight: ...}")
        });
        let epochs = scheduler.total_epochs.map(|epochs| {
            let message = format!("is {epochs}, but the sources of data.mixture end at different times");
            Problem::new("scheduler.total_epochs", message).suggest("give scheduler.total_steps instead")
        });
        let of_train_shards = [("data.split", data.split.is_some()), ("data.max_samples", data.max_samples.is_some())];
        let unused = of_train_shards.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| {
            Problem::new(key, "is for data.train_shards, and data.mixture names the training data").suggest("remove it")
        });
        let problems: Vec<Problem> = [shards, epochs].into_iter().flatten().chain(unused).collect();
        for problem in problems {
            let path = problem.path.clone();
            self.report(&["data.mixture", &path], problem);
        }
    }

    fn components_have_one_source(&mut self) {
        for (index, component) in self.config.data.mixture.iter().enumerate() {
            let path = format!("data.mixture[{index}]");
            let of_the_hub = [&component.config, &component.revision].iter().any(|key| key.is_some());
            let (message, suggestion) = match (&component.dataset, component.shards.is_empty()) {
                (Some(_), false) => {
                    ("names both a dataset and shards", "make two sources of them, each with its weight")
                }
                (None, true) => ("names no text", "give it a dataset (of the Hub) or shards (local files)"),
                (None, false) if of_the_hub => {
                    ("has local shards, which have no config or revision", "remove these keys")
                }
                _ => continue,
            };
            self.report(&[&path], Problem::new(&path, message).suggest(suggestion));
        }
    }

    fn packing_fits_format(&mut self) {
        let data = &self.config.data;
        let problem = match (data.format, data.packing) {
            (DataFormat::Chat, Packing::Concat) => {
                Problem::new("data.packing", "is concat, in which one conversation would read the one before")
                    .suggest("write documents (packed) or padded (one conversation per sequence)")
            }
            (DataFormat::Text, Packing::Padded) => {
                Problem::new("data.packing", "is padded, which pads conversations, but data.format is text")
                    .suggest("write concat or documents, or data.format: chat")
            }
            _ => return,
        };
        self.report(&["data.packing", "data.format"], problem);
    }

    fn chat_keys_need_chat(&mut self) {
        let data = &self.config.data;
        if data.format == DataFormat::Chat {
            return;
        }
        let keys = [
            ("data.chat_template", data.chat_template.is_some()),
            ("data.chat_template_date", data.chat_template_date.is_some()),
        ];
        for (key, _) in keys.into_iter().filter(|(_, is_given)| *is_given) {
            let problem = Problem::new(key, "is given, but data.format is text, which has no conversations");
            self.report(&[key, "data.format"], problem.suggest("remove it, or write data.format: chat"));
        }
    }

    fn fp8_recipe_needs_fp8(&mut self) {
        let runtime = &self.config.runtime;
        if runtime.fp8_recipe == Fp8Recipe::default() || runtime.precision == Precision::Fp8 {
            return;
        }
        let path = "runtime.fp8_recipe";
        let problem = Problem::new(path, "is given, but runtime.precision is not fp8");
        self.report(&[path, "runtime.precision"], problem.suggest("remove it, or write runtime.precision: fp8"));
    }

    fn samples_take_time(&mut self) {
        let path = "runtime.utilization_every";
        if self.config.runtime.utilization_every == Some(TimeSpan(0)) {
            self.report(&[path], Problem::new(path, "is 0s, less than a second").suggest("write null for no samples"));
        }
    }

    fn virtual_shards_divide_steps(&mut self) {
        let path = "runtime.deterministic_reduction";
        let Some(shards) = self.config.runtime.deterministic_reduction else { return };
        let sizes = ["stages", "data.batch_size", "data.gradient_accumulation_steps", "data.sequences_per_step"];
        if self.findings.rejected.iter().any(|key| key == path || sizes.iter().any(|size| key.starts_with(size))) {
            return;
        }
        if !shards.is_power_of_two() {
            let (below, above) = (1 << shards.ilog2(), shards.next_power_of_two());
            let problem = Problem::new(path, format!("is {shards}, which is not a power of two"));
            self.report(&[path], problem.suggest(format!("write {below} or {above}")));
            return;
        }
        let problem = self.config.stage_configs().iter().find_map(|config| match config.data.batch_size {
            BatchSize::Auto => {
                let message =
                    format!("is {shards}, but data.batch_size is auto, which depends on the machine's memory");
                Some(Problem::new(path, message).suggest("give data.batch_size as a number"))
            }
            BatchSize::Fixed(sequences) => {
                let (all, count) = (config.data.sequences_per_step, config.data.sequences_per_step / sequences);
                let message = format!(
                    "is {shards}, which does not divide the {count} micro-batches of a step ({all} sequences in \
                     micro-batches of {sequences})"
                );
                let largest = 1_usize << count.trailing_zeros();
                (!count.is_multiple_of(shards)).then(|| {
                    Problem::new(path, message)
                        .suggest(format!("write {largest} or less, or change data.sequences_per_step"))
                })
            }
        });
        if let Some(problem) = problem {
            self.report(&[path], problem);
        }
    }

    fn patience_needs_evaluations(&mut self) {
        let evaluation = &self.config.runtime.evaluation;
        let (Some(patience), None) = (evaluation.patience, evaluation.every_n_steps) else {
            return;
        };
        let path = "runtime.evaluation.patience";
        let message = format!("is {patience}, but runtime.evaluation.every_n_steps is null: nothing is evaluated");
        let problem = Problem::new(path, message).suggest("give every_n_steps, or remove patience");
        self.report(&[path, "runtime.evaluation.every_n_steps"], problem);
    }

    fn one_length(&mut self) {
        let scheduler = &self.config.scheduler;
        let problem = match (scheduler.total_steps, scheduler.total_epochs) {
            (None, None) => Problem::new("scheduler.total_steps", "is missing: how long to train")
                .suggest("give it (20 tokens per parameter are usual) or scheduler.total_epochs"),
            (Some(steps), Some(epochs)) => {
                let message = format!("is {epochs}, but scheduler.total_steps is given ({steps})");
                Problem::new("scheduler.total_epochs", message).suggest("remove one of the two")
            }
            _ => return,
        };
        let keys = ["scheduler.total_steps", "scheduler.total_epochs"];
        self.report(&keys, problem);
    }

    fn epochs_are_constant(&mut self) {
        let scheduler = &self.config.scheduler;
        if scheduler.total_epochs.is_none()
            || scheduler.total_steps.is_some()
            || scheduler.strategy == ScheduleStrategy::Constant
        {
            return;
        }
        let message = "needs the last step's number, which total_epochs does not give beforehand";
        let problem =
            Problem::new("scheduler.strategy", message).suggest("write constant, or give scheduler.total_steps");
        self.report(&["scheduler.strategy", "scheduler.total_epochs", "scheduler.total_steps"], problem);
    }

    fn warmup_ends(&mut self) {
        let (warmup, Some(total)) = (self.config.scheduler.warmup_steps, self.config.scheduler.total_steps) else {
            return;
        };
        if warmup < total {
            return;
        }
        let message = format!("is {warmup}, not less than scheduler.total_steps {total}");
        let problem = Problem::new("scheduler.warmup_steps", message).suggest(format!("{} is usual", total / 20));
        self.report(&["scheduler.warmup_steps", "scheduler.total_steps"], problem);
    }

    fn decay_fits(&mut self) {
        let scheduler = &self.config.scheduler;
        let (warmup, Some(total)) = (scheduler.warmup_steps, scheduler.total_steps) else {
            return;
        };
        let decay = scheduler.decay_steps_of(total);
        // A warm-up that leaves no steps at all has a rule of its own.
        let available = if warmup < total { total - warmup } else { total };
        if scheduler.strategy != ScheduleStrategy::Wsd || decay <= available {
            return;
        }
        let key = if scheduler.decay_steps.is_some() { "decay_steps" } else { "decay_fraction" };
        let message = format!(
            "makes a decay of {decay} steps, which after a warm-up of {warmup} do not fit in \
             scheduler.total_steps {total}"
        );
        let problem = Problem::new(format!("scheduler.{key}"), message).suggest("lower it");
        let keys = ["strategy", "warmup_steps", "total_steps", "decay_steps", "decay_fraction"]
            .map(|key| format!("scheduler.{key}"));
        self.report(&keys.each_ref().map(String::as_str), problem);
    }

    fn transferred_models_are_untied(&mut self) {
        let model = &self.config.model;
        if model.base_hidden_size.is_none() || !model.tie_embeddings {
            return;
        }
        let message = "needs model.tie_embeddings: false: a tied table would scale as an embedding and as a head";
        let problem = Problem::new("model.base_hidden_size", message).suggest("untie it, or leave the key out");
        self.report(&["model.base_hidden_size", "model.tie_embeddings"], problem);
    }

    fn batch_warmup_starts_small(&mut self) {
        let (first, all) = (self.config.scheduler.batch_warmup_start, self.config.data.sequences_per_step);
        let Some(first) = first.filter(|first| *first > all) else { return };
        let message = format!("is {first}, more than data.sequences_per_step {all}");
        let problem =
            Problem::new("scheduler.batch_warmup_start", message).suggest(format!("{} is usual", all.div_ceil(8)));
        self.report(&["scheduler.batch_warmup_start", "data.sequences_per_step"], problem);
    }

    fn rates_in_order(&mut self) {
        let (least, peak) = (self.config.scheduler.min_lr, self.config.optimizer.learning_rate);
        if least <= peak {
            return;
        }
        let message = format!("is {least:?}, more than optimizer.learning_rate {peak:?}");
        let problem = Problem::new("scheduler.min_lr", message).suggest("leave it out for a tenth of the peak");
        self.report(&["scheduler.min_lr", "optimizer.learning_rate"], problem);
    }
}
