//! The lines in the headers of `configs/*.yaml` that say what a preset needs on which GPU: `UPDATE=1 cargo test -p
//! training preset_headers` writes them, the test compares them.

use std::{fs, path::Path};

use run_config::RunConfig;

use super::*;

/// The preset for CPUs, whose header has no GPUs: one trains it in seconds.
const ON_A_CPU: &str = "smoke_cpu";
const FIRST: &str = "#   GPU ";

/// The unit of a range that begins with so many seconds, in seconds and by name.
fn unit(seconds: f64) -> (f64, &'static str) {
    match seconds {
        172_800.0.. => (86_400.0, "days"),
        7_200.0.. => (3_600.0, "hours"),
        _ => (60.0, "minutes"),
    }
}

fn time([most, least]: [f64; 2]) -> String {
    let (unit, name) = unit(least);
    let number = |seconds: f64| {
        if seconds < 10.0 * unit { format!("{:.1}", seconds / unit) } else { format!("{:.0}", seconds / unit) }
    };
    format!("{} {name}", range([number(least), number(most)]))
}

fn range([low, high]: [String; 2]) -> String {
    if low == high { low } else { format!("{low} to {high}") }
}

fn row(config: &RunConfig, gpu: &'static GpuSpec) -> String {
    let request = PlanRequest { gpu: Some(PlanGpu::Named(gpu)), ..PlanRequest::default() };
    let plan = MemoryPlan::on_machine(config, &request, &this_machine::ThisMachine).unwrap();
    if plan.shortage.is_some() {
        return format!("#   {:<12} does not fit", gpu.name);
    }
    let (speed, time) = (plan.speed.unwrap(), plan.training_time.unwrap().seconds.unwrap());
    let thousands = range(speed.tokens_per_second.map(|rate| format!("{:.0}", rate / 1e3)));
    let memory = format!("{:.1} of {:.1} GB", plan.bytes as f64 / 1e9, plan.budget.unwrap().bytes as f64 / 1e9);
    let batch = format!("{} x {}", plan.micro_batch, plan.gradient_accumulation_steps);
    format!("#   {:<12} {memory:<18} {batch:<10} {thousands:<12} {}", gpu.name, self::time(time))
}

fn lines(config: &RunConfig) -> String {
    let head = format!("{FIRST}         {:<18} {:<10} {:<12} time", "memory", "as", "k tokens/s");
    std::iter::once(head).chain(GPUS.iter().map(|gpu| row(config, gpu))).collect::<Vec<_>>().join("\n")
}

/// The text with these lines in the place of those that begin with `#   GPU` and end before a line `#`.
fn with_lines(text: &str, lines: &str) -> String {
    let start = text.find(FIRST).expect("the header has a line that begins with `#   GPU `");
    let end = start + text[start..].find("\n#\n").expect("an empty comment line follows");
    format!("{}{lines}{}", &text[..start], &text[end..])
}

#[test]
fn preset_headers_say_what_plan_says() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    for preset in run_config::presets().iter().filter(|preset| preset.name != ON_A_CPU) {
        let path = configs.join(preset.name).with_extension("yaml");
        let text = fs::read_to_string(&path).unwrap();
        let fresh = with_lines(&text, &lines(&RunConfig::parse(&text, run_config::Format::Yaml, &[]).unwrap()));
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &fresh).unwrap();
        }
        let name = preset.name;
        assert_eq!(fresh, fs::read_to_string(&path).unwrap(), "{name}: UPDATE=1 cargo test -p training preset_headers");
    }
}

#[test]
fn the_header_for_cpus_has_the_planned_memory() {
    let preset = run_config::presets().iter().find(|preset| preset.name == ON_A_CPU).unwrap();
    let overrides = ["model.vocab_size=4096", "runtime.device=cpu"].map(str::to_owned);
    let config = RunConfig::parse(preset.text, run_config::Format::Yaml, &overrides).unwrap();
    let plan = MemoryPlan::on_machine(&config, &PlanRequest::default(), &this_machine::ThisMachine).unwrap();
    let line = format!("#   memory              {} of buffers\n", crate::units::bytes(plan.bytes));
    assert!(preset.text.contains(&line), "{line}");
}
