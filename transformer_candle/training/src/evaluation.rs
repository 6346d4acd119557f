//! Evaluation on held-out text: mean loss a token, perplexity, and bits a byte, which tokenizers cannot flatter.

use dataset::{DataError, HeldOut};
use model::Decoder;

use crate::{
    engine::MicroBatch,
    error::Result,
    report::{ComponentEvaluation, EvaluationReport},
    stop::StopSignal,
};

/// The sums over one held-out text.
struct Totals {
    share: f64,
    nats: f64,
    tokens: u64,
    bytes: Option<u64>,
}

/// Runs the first `most` held-out sequences through the decoder, of a mixture's texts their shares of them, the same
/// ones every time. None if there is not one target, or if the signal is raised meanwhile.
pub(crate) fn evaluate(
    decoder: &mut Decoder,
    micro_batch: &mut MicroBatch,
    held_out: &mut [HeldOut],
    most: usize,
    step: u64,
    stop: &StopSignal,
) -> Result<Option<EvaluationReport>> {
    let (mut all, mut components) = (Vec::new(), Vec::new());
    for text in held_out {
        let totals = Totals::sum(decoder, micro_batch, text, most, stop)?;
        if stop.requested().is_some() {
            return Ok(None);
        }
        if totals.tokens > 0 {
            components.push(totals.component(text.name()));
            all.push(totals);
        }
    }
    if components.len() == 1 {
        components.clear();
    }
    Ok((!all.is_empty()).then(|| report(step, &all, components)))
}

impl Totals {
    fn sum(
        decoder: &mut Decoder,
        micro_batch: &mut MicroBatch,
        text: &mut HeldOut,
        most: usize,
        stop: &StopSignal,
    ) -> Result<Self> {
        let mut totals = Self { share: text.weight(), nats: 0.0, tokens: 0, bytes: Some(0) };
        let most = (most as f64 * totals.share).ceil() as usize;
        let interrupted = || stop.requested().is_some();
        for batch in text.batches(micro_batch.sequences(), most).unless(&interrupted) {
            let batch = match batch {
                Err(DataError::Interrupted) => break,
                batch => batch?,
            };
            if interrupted() {
                break;
            }
            micro_batch.upload(&batch, 0..batch.sequences())?;
            let losses = micro_batch.evaluate(decoder)?.read_f32()?;
            totals.nats += losses.iter().map(|loss| f64::from(*loss)).sum::<f64>();
            totals.tokens += batch.target_count as u64;
            totals.bytes = totals.bytes.zip(batch.target_bytes).map(|(sum, bytes)| sum + bytes);
        }
        Ok(totals)
    }

    fn component(&self, name: &str) -> ComponentEvaluation {
        let (loss, bits_per_byte) = means(std::slice::from_ref(self));
        ComponentEvaluation { name: name.to_owned(), share: self.share, loss, bits_per_byte, tokens: self.tokens }
    }
}

fn report(step: u64, all: &[Totals], components: Vec<ComponentEvaluation>) -> EvaluationReport {
    let (loss, bits_per_byte) = means(all);
    let tokens = all.iter().map(|totals| totals.tokens).sum();
    EvaluationReport { step, loss, perplexity: loss.exp(), bits_per_byte, tokens, components }
}

/// Nats a token and bits a byte of a text of which each part has its share of the tokens, however many of them were
/// evaluated.
fn means(parts: &[Totals]) -> (f64, Option<f64>) {
    let shares: f64 = parts.iter().map(|part| part.share).sum();
    let a_token = |sum: &dyn Fn(&Totals) -> f64| {
        parts.iter().map(|part| part.share * sum(part) / part.tokens as f64).sum::<f64>() / shares
    };
    let loss = a_token(&|part| part.nats);
    let known = parts.iter().all(|part| part.bytes.is_some());
    let bytes = a_token(&|part| part.bytes.unwrap_or(0) as f64);
    (loss, (known && bytes > 0.0).then(|| loss / bytes / std::f64::consts::LN_2))
}
