//! Python's methods of strings, lists and dictionaries in a chat template: those of minijinja-contrib.

use minijinja::value::Value;
use minijinja::{Error, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python_text;

/// Bytes that are written for one unit of fuel.
const BYTES_PER_FUEL: u64 = 64;

/// Calls a method. `format` pays for what it may write before it does.
pub(super) fn call(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str().filter(|_| method == "format") {
        let mut bytes = 0_u64;
        for argument in arguments {
            let repr_bytes = match argument.as_str() {
                Some(text) => text.len(),
                None => python_text::str(&|fuel| state.consume_fuel(fuel), argument)?.len(),
            };
            bytes = bytes.saturating_add(repr_bytes as u64);
        }
        let fields = text.matches('{').count() as u64;
        state.consume_fuel(fields.saturating_mul(bytes).saturating_add(widths(text)) / BYTES_PER_FUEL)?;
    }
    unknown_method_callback(state, value, method, arguments)
}

/// Returns the sum of the numbers in a format, which may be widths.
fn widths(format: &str) -> u64 {
    let numbers = format.split(|character: char| !character.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}
