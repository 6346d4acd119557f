//! Rules between stages, and between stages and the rest of the config.

use super::{StageConfig, StageStart};
use crate::RunConfig;
use crate::check::Findings;
use crate::error::Problem;

/// Checks every rule whose keys were themselves valid.
pub(crate) fn check(config: &RunConfig, findings: &mut Findings) {
    let Some(stages) = &config.stages else { return };
    if stages.is_empty() {
        let problem = Problem::new("stages", "is an empty list");
        findings.problems.push(problem.suggest("name at least one stage, or remove the key"));
        return;
    }
    let mut problems = of_the_run(config, findings);
    problems.extend(lengths_add_up(config, stages, findings));
    for (index, stage) in stages.iter().enumerate() {
        let path = format!("stages[{index}]");
        if !findings.rejected.contains(&path) {
            let stage_problems = [sequence_fits(config, stage, &path), start_exists(config, stage, index, &path)];
            problems.extend(stage_problems.into_iter().flatten());
            problems.extend(sources_exist(config, stage, &path));
        }
    }
    findings.problems.extend(problems);
}

/// Returns problems of keys that a run with stages cannot have.
fn of_the_run(config: &RunConfig, findings: &Findings) -> Vec<Problem> {
    let scheduler = &config.scheduler;
    let epochs = scheduler.total_epochs.map(|epochs| {
        let message = format!("is {epochs}, but stages last a number of steps");
        Problem::new("scheduler.total_epochs", message).suggest("remove it: the stages say how long to train")
    });
    let warmup = (scheduler.batch_warmup_steps > 0).then(|| {
        let message = format!("is {}, but with stages each stage has one batch", scheduler.batch_warmup_steps);
        Problem::new("scheduler.batch_warmup_steps", message)
            .suggest("remove it, and begin with short stages of few sequences_per_step")
    });
    let problems = [epochs, warmup].into_iter().flatten();
    problems.filter(|problem| !findings.rejected.contains(&problem.path)).collect()
}

fn lengths_add_up(config: &RunConfig, stages: &[StageConfig], findings: &Findings) -> Option<Problem> {
    let key = "scheduler.total_steps";
    let is_refused = |index| findings.rejected.contains(&format!("stages[{index}]"));
    if findings.rejected.contains(key) || (0..stages.len()).any(is_refused) {
        return None;
    }
    let (total, sum) = (config.scheduler.total_steps?, config.stage_ends().pop().unwrap_or(0));
    (total != sum).then(|| {
        let steps: Vec<_> = stages.iter().map(|stage| stage.steps.unwrap_or(0).to_string()).collect();
        let message = format!("is {total}, but the stages last {} = {sum} steps", steps.join(" + "));
        Problem::new(key, message).suggest("remove it, or change a stage's steps")
    })
}

fn sequence_fits(config: &RunConfig, stage: &StageConfig, path: &str) -> Option<Problem> {
    let (length, positions) = (stage.sequence_length?, config.model.max_position_embeddings);
    (length > positions).then(|| {
        let message = format!("is {length}, more than model.max_position_embeddings {positions}");
        Problem::new(format!("{path}.sequence_length"), message).suggest("raise the one or lower the other")
    })
}

fn start_exists(config: &RunConfig, stage: &StageConfig, index: usize, path: &str) -> Option<Problem> {
    if stage.at == StageStart::NextWindow {
        return None;
    }
    let problem = |message: &str| Problem::new(format!("{path}.at"), message).suggest("write next_window");
    if index == 0 {
        Some(problem("is window_end, but the first stage starts at the first window"))
    } else if !config.data.mixture.is_empty() {
        Some(problem("is window_end, but the windows of the sources of data.mixture end at different times"))
    } else {
        None
    }
}

/// Checks that the sources to which a stage gives weights are in the mixture, each once.
fn sources_exist(config: &RunConfig, stage: &StageConfig, path: &str) -> Vec<Problem> {
    let components = &config.data.mixture;
    let names: Vec<&str> = components.iter().filter_map(|component| component.stage_name()).collect();
    let problem = |(index, source): (usize, &str)| {
        let path = format!("{path}.mixture[{index}].source");
        let is_repeated = stage.mixture[..index].iter().any(|other| other.source == source);
        let (message, suggestion) = match names.iter().filter(|name| **name == source).count() {
            0 if components.is_empty() => ("is no source: the run has no data.mixture".to_owned(), String::new()),
            0 if names.is_empty() => ("is no source of data.mixture".to_owned(), "give its sources a name".to_owned()),
            0 => ("is no source of data.mixture".to_owned(), format!("its sources are {}", names.join(", "))),
            1 if is_repeated => ("is named twice in this stage".to_owned(), "remove one of the two".to_owned()),
            1 => return None,
            _ => {
                ("is the name of several sources".to_owned(), "give each a name of its own in data.mixture".to_owned())
            }
        };
        let problem = Problem::new(path, format!("{source:?} {message}"));
        Some(if suggestion.is_empty() { problem } else { problem.suggest(suggestion) })
    };
    let sources = stage.mixture.iter().map(|weight| weight.source.as_str());
    sources.enumerate().filter_map(problem).collect()
}
