//! Python's `'%s' % value` in a chat template: the operator `%` of strings, which minijinja has for numbers only.
//!
//! Before a template is compiled, `'...' % value` becomes `'...' | percent(value)` where the left side is a string in
//! quotes or a variable. The filter takes the same left side as `%` does, unless the variable is itself the right side
//! of an operator that binds as tightly, which is left as it is.

use minijinja::machinery::Token;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::bounded_values::{KEYWORDS, depth_change, operand_end};
use super::python_text;
use super::template_edits::Edits;
use super::template_limits::{Tag, visit_tags};

/// The name of the filter that computes `%`.
pub(super) const FILTER: &str = "percent";

/// Replaces the operator `%` of strings and variables in a template's tags by the filter.
pub(super) fn with_percent_filter(source: &str, syntax: &SyntaxConfig) -> Result<String, String> {
    let mut edits = Edits::default();
    visit_tags(source, syntax, |tag| {
        for (index, (token, place)) in tag.tokens.iter().enumerate() {
            if matches!(token, Token::Mod)
                && takes_filter(tag, index)
                && let Some((_, right)) = tag.tokens.get(operand_end(tag, index + 1))
            {
                edits.replace(place.clone(), format!("|{FILTER}("));
                edits.insert(right.end, ")");
            }
        }
        Ok(())
    })?;
    Ok(edits.apply(source))
}

/// Whether what stands before an operator `%` is a string, or a variable that no operator before it may own.
fn takes_filter(tag: &Tag, operator: usize) -> bool {
    let Some(start) = operator.checked_sub(1).and_then(|last| operand_start(tag, last)) else { return false };
    let previous = start.checked_sub(1).map(|index| &tag.tokens[index].0);
    let is_owned =
        matches!(previous, Some(Token::Mul | Token::Div | Token::FloorDiv | Token::Pow | Token::Mod | Token::Minus));
    !is_owned || matches!(tag.tokens[start].0, Token::Str(_) | Token::String(_))
}

/// Returns the first token of the value that ends with a token: a name, a string or a number, with its attributes, items
/// and arguments. `None` for other values.
fn operand_start(tag: &Tag, last: usize) -> Option<usize> {
    let mut start = last;
    loop {
        let is_attribute = start > 0 && matches!(tag.tokens[start - 1].0, Token::Dot);
        match tag.tokens[start].0 {
            Token::ParenClose | Token::BracketClose => start = opening(tag, start)?.checked_sub(1)?,
            Token::Ident(_) | Token::Int(_) if is_attribute => start = start.checked_sub(2)?,
            Token::Ident(name) => return (!KEYWORDS.contains(&name)).then_some(start),
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => {
                return Some(start);
            }
            _ => return None,
        }
    }
}

/// Returns the bracket that a bracket closes.
fn opening(tag: &Tag, close: usize) -> Option<usize> {
    let mut depth = 0;
    (0..=close).rev().find(|&index| {
        depth += depth_change(&tag.tokens[index].0);
        depth == 0
    })
}

/// Computes `left % right`: printf-style formatting of a string, else the remainder of numbers.
pub(super) fn apply(state: &mut State, left: &Value, right: &Value) -> Result<Value, Error> {
    if left.kind() == ValueKind::String {
        let values = match right.kind() {
            ValueKind::Seq => right.try_iter()?.collect(),
            _ => vec![right.clone()],
        };
        let texts = values.into_iter().map(|value| match value.kind() {
            ValueKind::String | ValueKind::Number | ValueKind::Map => Ok(value),
            _ => python_text::str(&|fuel| state.consume_fuel(fuel), &value).map(Value::from),
        });
        let arguments: Vec<Value> = std::iter::once(Ok(left.clone())).chain(texts).collect::<Result<_, Error>>()?;
        return state.apply_filter("format", &arguments);
    }
    let remainder = match (i64::try_from(left.clone()), i64::try_from(right.clone())) {
        (Ok(left), Ok(right)) => left.checked_rem_euclid(right).map(Value::from),
        _ => match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
            (Ok(left), Ok(right)) => Some(Value::from(left.rem_euclid(right))),
            _ => None,
        },
    };
    remainder.ok_or_else(|| {
        let message = format!("cannot compute {} % {}", left.kind(), right.kind());
        Error::new(ErrorKind::InvalidOperation, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter(FILTER, |state: &mut State, left: Value, right: Value| apply(state, &left, &right));
        let message = serde_json::json!({"role": "user", "content": "50% off", "n": 7, "none": null});
        let context = minijinja::value::Serde(serde_json::json!({"m": message, "f": "<%s>", "numbers": [1, 2, 3]}));
        let program = with_percent_filter(source, &SyntaxConfig::default()).unwrap();
        environment.render_str(&program, context).unwrap()
    }

    #[test]
    fn strings_format_as_in_python() {
        for (source, expected) in [
            ("{{ '%s: %s' % (m.role, m.content) }}", "user: 50% off"),
            ("{{ '<|%s|>' % m.role }}{{ m['content'] }}", "<|user|>50% off"),
            ("{{ '%s' % m['role']|upper + '!' }}", "USER!"),
            ("{{ f % m.role }}", "<user>"),
            ("{{ '%d of %05.1f%%' % (m.n, 2.5) }}", "7 of 002.5%"),
            ("{{ '%s' % m.none }}", "None"),
            ("{% set t = '[%s]' % (f % m.role) %}{{ t }}", "[<user>]"),
            ("{{ '%s' | format(m.role) }}", "user"),
        ] {
            assert_eq!(render(source), expected, "{source}");
        }
    }

    #[test]
    fn numbers_keep_their_remainder() {
        for (source, expected) in [
            ("{{ m.n % 2 }}", "1"),
            ("{% if (numbers|length) % 2 == 1 %}odd{% endif %}", "odd"),
            ("{% for n in numbers %}{% if loop.index0 % 2 == 0 %}{{ n }}{% endif %}{% endfor %}", "13"),
            ("{{ 3 * m.n % 4 }}", "1"),
            ("{{ 9 % m.n % 2 }}", "0"),
        ] {
            assert_eq!(render(source), expected, "{source}");
        }
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        let source = "100 % a {# '%s' % x #}{%- if '%' in m -%} %{% endif %}{{ 'it\\'s %' }}{{ {'a': [1]}['a'] }}";
        assert_eq!(with_percent_filter(source, &SyntaxConfig::default()).unwrap(), source);
    }
}
