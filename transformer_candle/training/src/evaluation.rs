//! Evaluation on held-out text: mean loss per token, perplexity, and bits per byte, which is comparable between
//! tokenizers.

use dataset::{DataError, HeldOut};
use model::Decoder;

use crate::{
    engine::MicroBatch,
    error::Result,
    ranks::Ranks,
    report::{ComponentEvaluation, EvaluationReport},
    stop::StopSignal,
};

/// Sums over the held-out text of one mixture component.
struct Totals {
    weight: f64,
    nats: f64,
    tokens: u64,
    bytes: Option<u64>,
}

/// What computes an evaluation, on this rank.
pub(crate) struct Evaluator<'a> {
    pub(crate) decoder: &'a mut Decoder,
    pub(crate) micro_batch: &'a mut MicroBatch,
    pub(crate) ranks: &'a Ranks,
    pub(crate) stop: &'a StopSignal,
}

impl Evaluator<'_> {
    /// Evaluates the first `max_sequences` held-out sequences, split by weight between a mixture's components; always
    /// the same ones, of which each rank computes its share. None if there are no targets or the stop signal is raised.
    pub(crate) fn evaluate(
        &mut self,
        held_out: &mut [HeldOut],
        max_sequences: usize,
        step: u64,
    ) -> Result<Option<EvaluationReport>> {
        let (mut all, mut components) = (Vec::new(), Vec::new());
        for text in held_out {
            let totals = self.sum(text, max_sequences)?;
            if self.stop.requested().is_some() {
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

    fn sum(&mut self, text: &mut HeldOut, max_sequences: usize) -> Result<Totals> {
        let Self { decoder, micro_batch, ranks, stop } = self;
        let mut totals = Totals { weight: text.weight(), nats: 0.0, tokens: 0, bytes: Some(0) };
        let max_sequences = (max_sequences as f64 * totals.weight).ceil() as usize;
        let interrupted = || stop.requested().is_some();
        let rank_info = ranks.rank_info();
        let mut nats = Vec::new();
        for (index, batch) in text.batches(micro_batch.sequences(), max_sequences).unless(&interrupted).enumerate() {
            let batch = match batch {
                Err(DataError::Interrupted) => break,
                batch => batch?,
            };
            if interrupted() {
                break;
            }
            nats.push(0.0);
            if index % rank_info.world_size != rank_info.rank {
                continue;
            }
            micro_batch.upload(&batch, 0..batch.sequences())?;
            let losses = micro_batch.evaluate(decoder)?.read_f32()?;
            nats[index] = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>();
            totals.tokens += batch.target_count as u64;
            totals.bytes = totals.bytes.zip(batch.target_bytes).map(|(sum, bytes)| sum + bytes);
        }
        totals.over_ranks(nats, ranks)
    }
}

impl Totals {
    /// Sums the totals over all ranks; `nats` has the sum of each batch, zero for batches of other ranks. They are
    /// added up in the order of the batches, so that the number of ranks changes no bit.
    fn over_ranks(mut self, mut nats: Vec<f64>, ranks: &Ranks) -> Result<Self> {
        if let Some(exchange) = ranks.exchange() {
            let bytes = self.bytes.map_or(f64::NAN, |bytes| bytes as f64);
            nats.extend([self.tokens as f64, bytes]);
            exchange.sum(&mut nats)?;
            self.bytes = nats.pop().filter(|bytes| !bytes.is_nan()).map(|bytes| bytes as u64);
            self.tokens = nats.pop().map_or(0, |tokens| tokens as u64);
        }
        Ok(Self { nats: nats.iter().sum(), ..self })
    }

    fn component(&self, name: &str) -> ComponentEvaluation {
        let (loss, bits_per_byte) = means(std::slice::from_ref(self));
        ComponentEvaluation { name: name.to_owned(), share: self.weight, loss, bits_per_byte, tokens: self.tokens }
    }
}

fn report(step: u64, all: &[Totals], components: Vec<ComponentEvaluation>) -> EvaluationReport {
    let (loss, bits_per_byte) = means(all);
    let tokens = all.iter().map(|totals| totals.tokens).sum();
    EvaluationReport { step, loss, perplexity: loss.exp(), bits_per_byte, tokens, components, samples: Vec::new() }
}

/// Returns nats per token and bits per byte of the mixture: each part's means are weighted by its mixture weight, not
/// by the number of tokens evaluated.
fn means(parts: &[Totals]) -> (f64, Option<f64>) {
    let total_weight: f64 = parts.iter().map(|part| part.weight).sum();
    let per_token = |sum: &dyn Fn(&Totals) -> f64| {
        parts.iter().map(|part| part.weight * sum(part) / part.tokens as f64).sum::<f64>() / total_weight
    };
    let loss = per_token(&|part| part.nats);
    let has_bytes = parts.iter().all(|part| part.bytes.is_some());
    let bytes = per_token(&|part| part.bytes.unwrap_or(0) as f64);
    (loss, (has_bytes && bytes > 0.0).then(|| loss / bytes / std::f64::consts::LN_2))
}
