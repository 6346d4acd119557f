//! Fills in keys that were left out from the keys that their defaults depend on.

use crate::check::Findings;
use crate::data::BatchSize;
use crate::error::Problem;
use crate::scheduler::ScheduleStrategy;
use crate::{DataConfig, DataFormat, Packing, RunConfig, stages};

/// Longest default warm-up, in steps.
const LONGEST_WARMUP: u64 = 2000;

/// Default warm-up in steps if the number of steps is not known beforehand.
const WARMUP_OF_EPOCHS: u64 = 100;

/// Most sequences of one optimizer step, as `data.sequences_per_step` has it.
const MOST_SEQUENCES: usize = 1_048_576;

/// Fills in the keys whose default depends on others.
pub(crate) fn fill(config: &mut RunConfig, findings: &mut Findings) {
    let tokens_per_step = config.data.tokens_per_step;
    translate_tokens_per_step(&mut config.data, findings);
    fill_batch(&mut config.data, findings);
    stages::fill(config, tokens_per_step, findings);
    let is_missing = |key: &str| !findings.valid_keys.contains(key);
    if is_missing("model.num_key_value_heads") {
        config.model.num_key_value_heads = config.model.num_attention_heads;
    }
    if is_missing("model.max_position_embeddings") {
        config.model.max_position_embeddings = config.longest_sequence();
    }
    if is_missing("scheduler.total_steps") {
        config.scheduler.total_steps = config.stage_ends().pop();
    }
    if is_missing("scheduler.strategy") && config.scheduler.total_epochs.is_some() {
        config.scheduler.strategy = ScheduleStrategy::Constant;
    }
    if is_missing("scheduler.warmup_steps") {
        config.scheduler.warmup_steps =
            config.scheduler.total_steps.map_or(WARMUP_OF_EPOCHS, |steps| (steps / 20).min(LONGEST_WARMUP));
    }
    if is_missing("scheduler.min_lr") {
        config.scheduler.min_lr = config.optimizer.learning_rate / 10.0;
    }
    if is_missing("lora.alpha") {
        config.lora.alpha = config.lora.rank.map(|rank| rank as f64);
    }
    if is_missing("data.packing") && config.data.format == DataFormat::Chat {
        config.data.packing = Packing::Documents;
    }
}

/// Converts `tokens_per_step` to `sequences_per_step`, which may be given as well if the two agree.
fn translate_tokens_per_step(data: &mut DataConfig, findings: &mut Findings) {
    const TOKENS: &str = "data.tokens_per_step";
    const SEQUENCES: &str = "data.sequences_per_step";
    let Some(tokens) = data.tokens_per_step.take() else {
        return;
    };
    if ["data.sequence_length", SEQUENCES].iter().any(|key| findings.rejected.contains(*key)) {
        return;
    }
    let length = data.sequence_length;
    let refused = match tokens / length {
        _ if !tokens.is_multiple_of(length) => {
            let message = format!("is {tokens}, not a multiple of data.sequence_length {length}");
            let below = tokens / length * length;
            let near = if below == 0 { String::new() } else { format!("{below} or ") };
            Some(Problem::new(TOKENS, message).suggest(format!("{near}{} would be", below + length)))
        }
        sequences if sequences > MOST_SEQUENCES => {
            let message = format!("is {tokens}, which makes {sequences} sequences of {length}");
            Some(Problem::new(TOKENS, message).suggest(format!("at most {MOST_SEQUENCES} sequences are possible")))
        }
        sequences if findings.valid_keys.contains(SEQUENCES) && data.sequences_per_step != sequences => {
            let other = data.sequences_per_step;
            let message = format!(
                "is {tokens}, which makes {sequences} sequences of {length}, but data.sequences_per_step is {other}"
            );
            Some(Problem::new(TOKENS, message).suggest("remove one of the two"))
        }
        sequences => {
            data.sequences_per_step = sequences;
            findings.valid_keys.insert(SEQUENCES.to_owned());
            None
        }
    };
    if let Some(problem) = refused {
        findings.problems.push(problem);
        findings.rejected.extend([TOKENS, SEQUENCES].map(str::to_owned));
    }
}

/// Computes the third of `batch_size`, `gradient_accumulation_steps` and `sequences_per_step` from the other two.
fn fill_batch(data: &mut DataConfig, findings: &mut Findings) {
    let keys = ["data.batch_size", "data.gradient_accumulation_steps", "data.sequences_per_step"];
    if keys.iter().any(|key| findings.rejected.contains(*key)) {
        return;
    }
    let [batch, accumulation, sequences] = keys.map(|key| findings.valid_keys.contains(key));
    let fixed = match data.batch_size {
        BatchSize::Fixed(fixed) if batch => Some(fixed),
        _ => None,
    };
    let accumulation = data.gradient_accumulation_steps.filter(|_| accumulation);
    let sequences = sequences.then_some(data.sequences_per_step);
    match solve(fixed, accumulation, sequences) {
        Ok((batch_size, accumulation, sequences)) => {
            data.batch_size = batch_size;
            data.gradient_accumulation_steps = accumulation;
            data.sequences_per_step = sequences;
        }
        Err(problem) => {
            findings.rejected.insert(problem.path.clone());
            findings.problems.push(problem);
        }
    }
}

/// Computes micro-batch, accumulation and sequences of a step from those that are given.
fn solve(
    batch: Option<usize>,
    accumulation: Option<usize>,
    sequences: Option<usize>,
) -> Result<(BatchSize, Option<usize>, usize), Problem> {
    let (batch, steps) = match (batch, accumulation, sequences) {
        (Some(batch), Some(steps), _) => (batch, steps),
        (Some(batch), None, Some(whole)) => (batch, divide("batch_size", batch, whole)?),
        (Some(batch), None, None) => (batch, 1),
        (None, Some(steps), Some(whole)) => (divide("gradient_accumulation_steps", steps, whole)?, steps),
        (None, None, Some(whole)) => return Ok((BatchSize::Auto, None, whole)),
        (None, _, None) => {
            let message = "is missing: how many sequences make an optimizer step";
            return Err(Problem::new("data.sequences_per_step", message)
                .suggest("give it, or batch_size and gradient_accumulation_steps"));
        }
    };
    let product = batch * steps;
    if let Some(whole) = sequences.filter(|whole| *whole != product) {
        let message = format!("is {whole}, but batch_size {batch} * accumulation {steps} = {product}");
        return Err(Problem::new("data.sequences_per_step", message).suggest("remove one of the three"));
    }
    if product > MOST_SEQUENCES {
        let message = format!("is {steps}, which with batch_size {batch} makes {product} per step");
        return Err(Problem::new("data.gradient_accumulation_steps", message)
            .suggest(format!("at most {MOST_SEQUENCES} sequences are possible")));
    }
    Ok((BatchSize::Fixed(batch), Some(steps), product))
}

fn divide(key: &str, divisor: usize, sequences: usize) -> Result<usize, Problem> {
    if sequences.is_multiple_of(divisor) {
        return Ok(sequences / divisor);
    }
    Err(Problem::new(
        format!("data.{key}"),
        format!("is {divisor}, which does not divide data.sequences_per_step {sequences}"),
    )
    .suggest(format!("{} would", near_divisor(sequences, divisor))))
}

/// Returns the divisor of `number` nearest to `wish`.
pub(crate) fn near_divisor(number: usize, wish: usize) -> usize {
    (1..=number)
        .filter(|divisor| number.is_multiple_of(*divisor))
        .min_by_key(|divisor| divisor.abs_diff(wish))
        .unwrap_or(1)
}
