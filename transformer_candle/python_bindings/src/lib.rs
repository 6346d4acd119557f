//! The trainer as the Python extension `orchestrator._native`: arguments in, values and exceptions out, no logic of its
//! own.
//!
//! Long work runs without the GIL and ends when a signal handler raises something.

// PyO3 passes arguments by value.
#![allow(clippy::needless_pass_by_value)]

mod arguments;
mod chat;
mod commands;
mod config;
mod data;
mod errors;
mod evaluation;
mod generation;
mod gpu_state;
mod json;
mod lock;
mod machine;
mod model_directory;
mod named_run;
mod plan;
mod process_owned;
mod ranks;
mod signals;
mod stream;
mod trainer;
mod validate_data;
mod values;

use pyo3::prelude::*;
use run_config::BUILT_IN_TEMPLATES;
use training::launcher::LAUNCHER;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("LAUNCHER", LAUNCHER)?;
    module.add("BUILT_IN_CHAT_TEMPLATES", BUILT_IN_TEMPLATES)?;
    errors::register(module)?;
    module.add_class::<chat::ChatModel>()?;
    module.add_class::<chat::Reply>()?;
    module.add_class::<config::RunConfig>()?;
    module.add_class::<data::DataSource>()?;
    module.add_class::<data::Documents>()?;
    module.add_class::<generation::Completion>()?;
    module.add_class::<lock::RunLock>()?;
    module.add_class::<machine::Gpu>()?;
    module.add_class::<plan::MemoryPlan>()?;
    module.add_class::<ranks::Memory>()?;
    module.add_class::<stream::TokenStream>()?;
    module.add_class::<evaluation::EvaluationReport>()?;
    module.add_class::<trainer::StepReport>()?;
    module.add_class::<trainer::Trainer>()?;
    module.add_class::<validate_data::DataReport>()?;
    module.add_function(wrap_pyfunction!(commands::run_command, module)?)?;
    module.add_function(wrap_pyfunction!(commands::declared_commands, module)?)?;
    module.add_function(wrap_pyfunction!(config::config_to_yaml, module)?)?;
    module.add_function(wrap_pyfunction!(config::json_schema, module)?)?;
    module.add_function(wrap_pyfunction!(config::parse_config, module)?)?;
    module.add_function(wrap_pyfunction!(config::changes_on_resume, module)?)?;
    module.add_function(wrap_pyfunction!(config::presets, module)?)?;
    module.add_function(wrap_pyfunction!(config::vocab_size, module)?)?;
    module.add_function(wrap_pyfunction!(config::check_tokenizer_json, module)?)?;
    module.add_function(wrap_pyfunction!(config::check_adapter_config, module)?)?;
    module.add_function(wrap_pyfunction!(data::cache_root, module)?)?;
    module.add_function(wrap_pyfunction!(evaluation::evaluate_model, module)?)?;
    module.add_function(wrap_pyfunction!(generation::generate, module)?)?;
    module.add_function(wrap_pyfunction!(generation::logits, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_state::gpu_state, module)?)?;
    module.add_function(wrap_pyfunction!(data::hub_token, module)?)?;
    module.add_function(wrap_pyfunction!(data::hub_proxy, module)?)?;
    module.add_function(wrap_pyfunction!(data::duration, module)?)?;
    module.add_function(wrap_pyfunction!(data::redacted_url, module)?)?;
    module.add_function(wrap_pyfunction!(machine::gpus, module)?)?;
    module.add_function(wrap_pyfunction!(machine::check_threads, module)?)?;
    module.add_function(wrap_pyfunction!(machine::check_profile, module)?)?;
    module.add_function(wrap_pyfunction!(machine::check_sequences, module)?)?;
    module.add_function(wrap_pyfunction!(machine::check_time_limit, module)?)?;
    module.add_function(wrap_pyfunction!(machine::environment, module)?)?;
    module.add_function(wrap_pyfunction!(machine::open_device, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::model_directory, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::model_file_problem, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::checked_model_config, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::checked_adapters, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::check_start_adapters, module)?)?;
    module.add_function(wrap_pyfunction!(model_directory::model_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(named_run::run_directory, module)?)?;
    module.add_function(wrap_pyfunction!(named_run::config_of_run, module)?)?;
    module.add_function(wrap_pyfunction!(named_run::model_of_run, module)?)?;
    module.add_function(wrap_pyfunction!(named_run::runs, module)?)?;
    module.add_function(wrap_pyfunction!(named_run::parse_count, module)?)?;
    module.add_function(wrap_pyfunction!(plan::gpu_table, module)?)?;
    module.add_function(wrap_pyfunction!(plan::memory_plan, module)?)?;
    module.add_function(wrap_pyfunction!(ranks::train_rank, module)?)?;
    module.add_function(wrap_pyfunction!(commands::stop_with_launcher, module)?)?;
    module.add_function(wrap_pyfunction!(validate_data::validate_data, module)?)
}
