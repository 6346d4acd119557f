//! The commands: what each one takes and does is in its file. They are plain functions over plain options, so that Python calls
//! the same ones; a program puts them on a command line and runs them with [`program::run`].

pub mod arguments;
pub mod bench;
pub mod checkpoint;
pub mod evaluate;
pub mod generate;
mod model_source;
pub mod output;
pub mod plan;
pub mod program;
pub mod train;
mod until_stopped;
pub mod validate_data;

pub use model_source::ModelSource;
