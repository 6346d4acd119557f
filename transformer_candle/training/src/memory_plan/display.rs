//! Formats a plan for people.

use std::{collections::BTreeMap, fmt};

use run_config::Precision;

use super::{
    Cost, ExchangeSpeed, FitOption, MemoryPlan, SpeedSource, StagePlan, TrainingTime,
    bar::{Segment, bar},
};
use crate::{
    error::shortage::recompute,
    units::{bytes, flops, grouped, step_time, time},
};

/// Above this share of a step's FLOPs in the optimizer's GEMMs, more tokens per step are suggested.
const LARGEST_OPTIMIZER_SHARE: f64 = 0.2;
/// A run this close to Chinchilla's tokens counts as meeting them.
const CHINCHILLA_TOLERANCE: f64 = 0.01;

fn precision(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp32 => "fp32",
        Precision::Bf16 => "bf16",
        Precision::Fp8 => "fp8",
    }
}

/// `26.4 B`
fn tokens(number: u64) -> String {
    match number {
        1_000_000_000_000.. => format!("{:.2} T", number as f64 / 1e12),
        1_000_000_000.. => format!("{:.2} B", number as f64 / 1e9),
        1_000_000.. => format!("{:.2} M", number as f64 / 1e6),
        _ => grouped(number),
    }
}

/// `15 d 7 h to 19 d 1 h`, or one of them where both are the same.
fn range(low: &str, high: &str) -> String {
    if low == high { low.to_owned() } else { format!("{low} to {high}") }
}

/// `14,900 to 19,900`, with three digits that say something where it is a range.
pub(crate) fn rates([low, high]: [f64; 2]) -> String {
    let rounded = |rate: f64| {
        let unit = 10_f64.powf((rate.max(1.0).log10().floor() - 2.0).max(0.0));
        grouped(((rate / unit).round() * unit) as u64)
    };
    if (low - high).abs() <= f64::EPSILON * high {
        grouped(high.round() as u64)
    } else {
        range(&rounded(low), &rounded(high))
    }
}

/// `1,234` or `3.21`: an amount of money.
fn money(amount: f64) -> String {
    if amount >= 100.0 { grouped(amount.round() as u64) } else { format!("{amount:.2}") }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![("model", self.model())];
        if self.stages.is_empty() {
            rows.push(("step", self.step()));
        }
        rows.extend(
            self.stages.iter().enumerate().map(|(line, stage)| (label("stages", line), self.stage(line, stage))),
        );
        rows.push(("length", self.length()));
        rows.push(("device", self.device_line()));
        rows.extend(self.memory().into_iter().enumerate().map(|(line, text)| (label("memory", line), text)));
        rows.extend(self.process_bytes.map(|whole| ("process", self.process(whole))));
        rows.extend(self.largest().into_iter().enumerate().map(|(line, text)| (label("largest", line), text)));
        rows.push(("disk", self.disk()));
        rows.extend(self.optimizer_share.map(|share| ("optimizer", optimizer(share))));
        rows.extend(self.speed().map(|text| ("speed", text)));
        let shares = self.speed.as_ref().and_then(|speed| speed.parts.as_ref());
        rows.extend(shares.map(|shares| ("", parts(shares))));
        let exchange = self.speed.as_ref().and_then(|speed| speed.exchange.as_ref());
        rows.extend(exchange.map(|exchange| ("exchange", self::exchange(exchange))));
        rows.extend(self.training_time.as_ref().and_then(training_time).map(|text| ("time", text)));
        rows.extend(self.cost.as_ref().map(|cost| ("cost", self::cost(cost, self.ranks))));
        let lines: Vec<String> = rows.iter().map(|(name, text)| format!("{name:<11}{text}")).collect();
        f.write_str(&lines.join("\n"))?;
        let Some(shortage) = &self.shortage else { return Ok(()) };
        write!(f, "\n\n{}", capitalized(&shortage.to_string()))?;
        if self.options.is_empty() {
            return Ok(());
        }
        f.write_str("\n\nWhat could be changed, each alone:\n")?;
        let lines: Vec<String> = self.options.iter().map(option).collect();
        f.write_str(&lines.join("\n"))
    }
}

fn label(name: &'static str, line: usize) -> &'static str {
    if line == 0 { name } else { "" }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

impl MemoryPlan {
    fn model(&self) -> String {
        let (parameters, precision) = (grouped(self.parameters), precision(self.precision));
        let trained = if self.trainable_parameters == self.parameters {
            String::new()
        } else {
            let base = if self.fp8_base { " beside a base in fp8" } else { "" };
            format!(" and {} of adapters that train{base}", grouped(self.trainable_parameters))
        };
        format!("{parameters} parameters{trained}, {precision}, {} per token", flops(self.flops_per_token))
    }

    fn step(&self) -> String {
        let warm_up = |(first, steps)| format!("; {first} sequences in the first step, all after {}", grouped(steps));
        format!(
            "{} tokens: {} sequence{} of {}, as {} x {} (micro-batch x accumulation){}{}, activation_recompute: {}{}",
            grouped(self.tokens_per_step),
            grouped(self.sequences_per_step),
            if self.sequences_per_step == 1 { "" } else { "s" },
            grouped(self.sequence_length),
            self.micro_batch,
            self.gradient_accumulation_steps / self.ranks.unwrap_or(1),
            self.ranks.map_or_else(String::new, |ranks| format!(" on each of {ranks} ranks")),
            self.deterministic_reduction
                .map_or_else(String::new, |shards| format!(", summed as a tree of {shards} virtual shards")),
            recompute(self.activation_recompute),
            self.batch_warmup.map(warm_up).unwrap_or_default()
        )
    }

    fn length(&self) -> String {
        let Some(TrainingTime { steps, tokens: total, chinchilla_tokens, chinchilla_share, .. }) = self.training_time
        else {
            return "determined by scheduler.total_epochs; --tokens plans for a number of tokens".into();
        };
        let per_parameter = total as f64 / self.parameters as f64;
        let number = |value: f64, whole_from: f64| {
            if value < whole_from { format!("{value:.1}") } else { grouped(value.round() as u64) }
        };
        let per_parameter = number(per_parameter, 1000.0);
        let length = format!("{} steps, {} tokens, {per_parameter} per parameter", grouped(steps), tokens(total));
        let (Some(chinchilla_share), Some(chinchilla_tokens)) = (chinchilla_share, chinchilla_tokens) else {
            return length;
        };
        if (chinchilla_share - 1.0).abs() < CHINCHILLA_TOLERANCE {
            return format!("{length}: what Chinchilla's 20 ask for");
        }
        let share = number(100.0 * chinchilla_share, 10.0);
        format!("{length}: {share} % of the {} that Chinchilla's 20 ask for", tokens(chinchilla_tokens))
    }

    fn device_line(&self) -> String {
        let device = &self.device;
        let memory = device.memory_bytes.map(|memory| format!("{} as CUDA reports it", bytes(memory)));
        let peak = device.bf16_flops.map(|peak| format!("{:.1} TFLOP/s in bf16", peak / 1e12));
        let bandwidth = device.gpu.map(|gpu| format!("{:.2} TB/s", gpu.bytes_per_second / 1e12));
        let assumed =
            device.assumed.then(|| "assumed, as there is no usable GPU here (--gpu names another)".to_owned());
        let facts: Vec<String> = [memory, peak, bandwidth, assumed].into_iter().flatten().collect();
        if facts.is_empty() { device.name.clone() } else { format!("{}: {}", device.name, facts.join(", ")) }
    }

    /// The sum, a bar, and a line per category.
    fn memory(&self) -> Vec<String> {
        let budget = self.budget.as_ref();
        let of = budget.map(|budget| format!(" of {budget}")).unwrap_or_default();
        let segments: Vec<Segment> = self
            .bytes_by_category
            .iter()
            .scan(Vec::new(), |letters: &mut Vec<char>, category| {
                let letter = letter(&category.category, letters);
                letters.push(letter);
                Some(Segment { letter, bytes: category.bytes })
            })
            .collect();
        let mut lines = vec![format!("{}{of}", bytes(self.bytes))];
        lines.extend(budget.map(|budget| bar(&segments, budget.bytes)));
        lines.extend(self.bytes_by_category.iter().zip(&segments).map(|(category, segment)| {
            format!("{} {:>10}  {}", segment.letter, bytes(category.bytes), category.category)
        }));
        lines.push(format!("  {:>10}  host memory while saving", bytes(self.saving_bytes)));
        lines
    }

    fn process(&self, whole: u64) -> String {
        let rest = bytes(whole - self.bytes - self.saving_bytes);
        format!("{} resident at the peak: also {rest} of program and data stream", bytes(whole))
    }

    /// The largest micro-batch that fits for each recompute mode.
    fn largest(&self) -> Vec<String> {
        let line = |fit: &super::FittingMicroBatch| {
            let requirement = &fit.requirement;
            let speed = fit.tokens_per_second.map(|speed| format!("  {}", self.rates(speed)));
            format!(
                "{:<9} {:>5} {:>11}{}",
                recompute(requirement.activation_recompute),
                requirement.micro_batch,
                bytes(requirement.bytes),
                speed.unwrap_or_default()
            )
        };
        let lines: Vec<String> = self.largest_micro_batches.iter().map(line).collect();
        let heading = (!lines.is_empty()).then(|| "micro-batch that fits, by activation_recompute:".to_owned());
        heading.into_iter().chain(lines).collect()
    }

    /// `14,900 to 19,900 tokens/s`: of conversations positions/s, of which only some are target tokens.
    fn rates(&self, speed: [f64; 2]) -> String {
        format!("{} {}", rates(speed), if self.conversations { "positions/s" } else { "tokens/s" })
    }

    /// `1: steps 1 to 400, 32 sequences of 512 as 8 x 4, learning rate 0.001, 12.3 GB alone`
    fn stage(&self, index: usize, stage: &StagePlan) -> String {
        let rate = stage.speed.as_ref().map(|speed| format!(", {}", self.rates(speed.tokens_per_second)));
        format!(
            "{}: steps {} to {}, {} sequences of {} as {} x {}, learning rate up to {}, {} alone{}",
            index + 1,
            grouped(stage.first_step),
            grouped(stage.last_step),
            grouped(stage.sequences_per_step),
            grouped(stage.sequence_length),
            stage.micro_batch,
            stage.gradient_accumulation_steps,
            stage.learning_rate,
            bytes(stage.bytes),
            rate.unwrap_or_default()
        )
    }

    fn disk(&self) -> String {
        let (one, all) = (bytes(self.checkpoint_bytes), bytes(self.checkpoint_bytes * self.checkpoints));
        format!("{one} per checkpoint, at most {} at a time: {all}", self.checkpoints)
    }

    fn speed(&self) -> Option<String> {
        let Some(speed) = &self.speed else {
            let unknown = "not known for this GPU: `transformer-candle bench --config FILE` measures it";
            return (self.device.memory_bytes.is_some()).then(|| unknown.to_owned());
        };
        let percent = |share: f64| format!("{:.0}", 100.0 * share);
        let of = if self.precision == Precision::Fp8 { " of the bf16 peak" } else { "" };
        let mfu = speed.mfu.map(|[low, high]| format!(", MFU {} %{of}", range(&percent(low), &percent(high))));
        let [slow, fast] = speed.step_seconds.map(step_time);
        let step = range(&fast, &slow);
        let bench = match speed.source {
            SpeedSource::Roofline if self.device.gpu.is_some() => "; not measured",
            _ => "",
        };
        let rate = self.rates(speed.tokens_per_second);
        let of_ranks = speed.exchange.as_ref().zip(self.ranks).map(|(exchange, ranks)| {
            let [a, b] = exchange.efficiency;
            format!(", {} % of {ranks} times one rank", range(&percent(a.min(b)), &percent(a.max(b))))
        });
        let (mfu, of_ranks) = (mfu.unwrap_or_default(), of_ranks.unwrap_or_default());
        Some(format!("{rate}, {step} per step{mfu}{of_ranks}, {}{bench}", speed.origin))
    }
}

/// `gemm 76 %, attention 11 %`, the largest first.
fn parts(shares: &BTreeMap<&'static str, f64>) -> String {
    let mut shares: Vec<_> = shares.iter().collect();
    shares.sort_by(|a, b| b.1.total_cmp(a.1));
    let share = |(name, share): (&&str, &f64)| format!("{} {:.0} %", name.replace('_', " "), 100.0 * share);
    shares.into_iter().map(share).collect::<Vec<_>>().join(", ")
}

/// `3.11 GB to and from each rank per step over PCIe 5.0 x16, 78 ms to 194 ms, 30 ms to 80 ms of it beside no computation`
fn exchange(exchange: &ExchangeSpeed) -> String {
    let ExchangeSpeed { link, bytes_per_rank, seconds, exposed_seconds, .. } = exchange;
    let times = |[slow, fast]: [f64; 2]| range(&step_time(fast), &step_time(slow));
    format!(
        "{} to and from each rank per step over {link}, {}, {} of it beside no computation",
        bytes(bytes_per_rank.round() as u64),
        times(*seconds),
        times(*exposed_seconds)
    )
}

fn option(option: &FitOption) -> String {
    let FitOption { name, changes, bytes: needed_bytes, saves_bytes, fits, relative_speed, costs } = option;
    let keys: Vec<String> = changes.iter().map(super::Change::as_override).collect();
    let speed = relative_speed.map(|speed| match 100.0 * (speed - 1.0) {
        percent @ 0.5.. => format!(", {percent:.0} % faster"),
        percent if percent <= -0.5 => format!(", {:.0} % slower", -percent),
        _ => ", as fast".to_owned(),
    });
    let verdict = if *fits { "fits" } else { "not enough" };
    let (saves, needs, speed) = (bytes(*saves_bytes), bytes(*needed_bytes), speed.unwrap_or_default());
    let what = format!("  {name:<20} {verdict:<10}  saves {saves:>8}, needs {needs:>8}{speed}");
    format!("{what}\n  {:<20} {}: {costs}", "", keys.join(" "))
}

/// The first letter of a category that no other has, capital.
fn letter(category: &str, used_letters: &[char]) -> char {
    let letters = category.chars().filter(char::is_ascii_alphabetic).map(|letter| letter.to_ascii_uppercase());
    letters.into_iter().find(|letter| !used_letters.contains(letter)).unwrap_or('#')
}

/// Formats the share of the optimizer's GEMMs, which cost the same whatever the tokens per step.
fn optimizer(share: f64) -> String {
    let text = format!("Muon's GEMMs are {:.1} % of a step's FLOPs", 100.0 * share);
    if share <= LARGEST_OPTIMIZER_SHARE {
        return text;
    }
    format!("{text}: more tokens per step (data.sequences_per_step) make them cheaper")
}

fn training_time(training: &TrainingTime) -> Option<String> {
    let [slow, fast] = training.seconds?;
    let length = range(&time(fast), &time(slow));
    let ends = training.end_dates.as_ref().map(|[late, early]| {
        let days = if early == late { format!("on {early}") } else { format!("between {early} and {late}") };
        format!("; started now, it ends {days} (UTC)")
    });
    Some(format!("{length} of training steps{}", ends.unwrap_or_default()))
}

/// Formats a cost; the power is that of all ranks, where there are several.
fn cost(cost: &Cost, ranks: Option<u64>) -> String {
    let in_all = if ranks.is_some_and(|ranks| ranks > 1) { " in all" } else { "" };
    let amounts = |[most, least]: [f64; 2]| range(&money(least), &money(most));
    let power = cost.kilowatt_hours.zip(cost.watts).map(|(energy, watts)| {
        let price = cost.electricity.map(|price| format!(", {}", amounts(price)));
        let watts = grouped(watts.round() as u64);
        format!("electricity: {} kWh at {watts} W{in_all}{}", amounts(energy), price.unwrap_or_default())
    });
    let power =
        power.or_else(|| cost.power_is_unknown.then(|| "electricity: add --watts, what this machine draws".into()));
    let rent = cost.rent.map(|rent| format!("rent: {}", amounts(rent)));
    [power, rent].into_iter().flatten().collect::<Vec<_>>().join("; ")
}
