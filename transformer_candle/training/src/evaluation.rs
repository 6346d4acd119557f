//! Evaluation on held-out text: mean loss a token, perplexity, and bits a byte, which tokenizers cannot flatter.

use dataset::HeldOut;
use model::Decoder;
use serde::{Deserialize, Serialize};

use crate::{error::Result, stop::StopSignal, trainer::MicroBatch};

/// What one evaluation found. A line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationReport {
    /// Optimizer steps taken before it.
    pub step: u64,
    /// Mean over the held-out target tokens, nats.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Nats of all targets over the bytes of their text, in bits. None where the tokenizer's tokens have no length in bytes.
    pub bits_per_byte: Option<f64>,
    /// Target tokens evaluated.
    pub tokens: u64,
}

/// The sums an evaluation is made of.
#[derive(Default)]
struct Totals {
    nats: f64,
    tokens: u64,
    bytes: Option<u64>,
}

/// Runs the first `most` held-out sequences through the decoder, the same ones every time. None if there is not one target,
/// or if the signal is raised meanwhile.
pub(crate) fn evaluate(
    decoder: &mut Decoder,
    micro_batch: &mut MicroBatch,
    held_out: &mut HeldOut,
    most: usize,
    step: u64,
    stop: &StopSignal,
) -> Result<Option<EvaluationReport>> {
    let mut totals = Totals { bytes: Some(0), ..Totals::default() };
    let mut left = most;
    for batch in held_out.batches(micro_batch.sequences()) {
        let batch = batch?;
        // A batch is taken whole or not at all, so that its bytes are those of its targets.
        if batch.sequences() > left || stop.requested().is_some() {
            break;
        }
        left -= batch.sequences();
        micro_batch.upload(&batch, 0..batch.sequences())?;
        let losses = micro_batch.evaluate(decoder)?.read_f32()?;
        totals.nats += losses.iter().map(|loss| f64::from(*loss)).sum::<f64>();
        totals.tokens += batch.target_count as u64;
        totals.bytes = totals.bytes.zip(batch.target_bytes).map(|(sum, bytes)| sum + bytes);
    }
    if totals.tokens == 0 || stop.requested().is_some() {
        return Ok(None);
    }
    Ok(Some(totals.report(step)))
}

impl Totals {
    fn report(&self, step: u64) -> EvaluationReport {
        let loss = self.nats / self.tokens as f64;
        let bits_per_byte = |bytes: u64| self.nats / std::f64::consts::LN_2 / bytes as f64;
        EvaluationReport {
            step,
            loss,
            perplexity: loss.exp(),
            bits_per_byte: self.bytes.filter(|bytes| *bytes > 0).map(bits_per_byte),
            tokens: self.tokens,
        }
    }
}
