//! From a kernel source to C++ for the emulator, and to the signatures of its kernels.
//!
//! Our kernels are written in a plain style, which these few rewritings are enough for; line numbers stay, so the compiler's
//! messages point into the source.

use std::fmt::Write;

use fancy_regex::Regex;

/// A parameter of a kernel: `device const T* x [[buffer(0)]]`.
#[derive(Debug, Clone)]
pub struct Parameter {
    pub ty: String,
    pub name: String,
    /// What stands in the brackets.
    pub attribute: String,
}

impl Parameter {
    /// k of `buffer(k)`.
    pub fn buffer(&self) -> Option<usize> {
        self.attribute.strip_prefix("buffer(")?.strip_suffix(')')?.parse().ok()
    }
}

/// A function that can be dispatched: its host name, and the C++ function with its template arguments.
#[derive(Debug, Clone)]
pub struct Instance {
    pub name: String,
    pub call: String,
    pub parameters: Vec<Parameter>,
}

pub struct Source {
    /// Without comments and instantiations.
    pub text: String,
    pub instances: Vec<Instance>,
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

/// Comments become as many empty lines as they had.
fn without_comments(text: &str) -> String {
    let text = regex(r"//[^\n]*").replace_all(text, "").into_owned();
    regex(r"(?s)/\*.*?\*/")
        .replace_all(&text, |c: &fancy_regex::Captures| "\n".repeat(c[0].matches('\n').count()))
        .into()
}

/// Parts at the commas that stand in no bracket.
fn parts(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        depth += i32::from("([{<".contains(c)) - i32::from(")]}>".contains(c));
        match c {
            ',' if depth == 0 => parts.push(String::new()),
            _ => parts.last_mut().expect("never empty").push(c),
        }
    }
    parts.iter().map(|part| part.split_whitespace().collect::<Vec<_>>().join(" ")).filter(|p| !p.is_empty()).collect()
}

/// The text between the bracket at `open` and its partner.
fn bracketed(text: &str, open: usize) -> &str {
    let mut depth = 0;
    for (i, c) in text[open..].char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return &text[open + 1..open + i];
        }
    }
    panic!("a bracket that is never closed: {}", &text[open..(open + 40).min(text.len())])
}

fn parameter(text: &str) -> Parameter {
    let pattern = regex(r"(?s)^(.*?)(\w+)\s*\[\[\s*(.*?)\s*\]\]$");
    let found = pattern.captures(text).unwrap().unwrap_or_else(|| panic!("a parameter without an attribute: {text}"));
    Parameter { ty: found[1].trim().into(), name: found[2].into(), attribute: found[3].into() }
}

/// The kernels that a source without comments defines, by function name: parameters, and whether it is a template.
fn definitions(text: &str) -> Vec<(String, Vec<Parameter>, bool)> {
    let pattern = regex(r"(template\s*<[^;{}()]*>\s*)?\bkernel\s+void\s+(\w+)\s*\(");
    let found = pattern.captures_iter(text).map(|c| {
        let c = c.unwrap();
        let list = parts(bracketed(text, c.get(0).unwrap().end() - 1));
        (c[2].to_string(), list.iter().map(|p| parameter(p)).collect(), c.get(1).is_some())
    });
    found.collect()
}

/// What an instantiating macro comes to: lists of a host name, a function and its template arguments. `text` may define it.
fn instantiations(text: &str, name: &str, list: &[String]) -> Vec<Vec<String>> {
    let with = |suffix: &str, ty: &str| vec![format!("{}{suffix}", literal(&list[0])), list[1].clone(), ty.into()];
    match name {
        "instantiate" => return vec![[&[literal(&list[0])], &list[1..]].concat()],
        "instantiate_types" => return vec![with("_f32", "float"), with("_f16", "half"), with("_bf16", "bf16")],
        _ => {}
    }
    let pattern = regex(&format!(r"(?m)^#define {name}\((.*?)\)((?:.*\\\n)+.*)"));
    let found = pattern.captures(text).unwrap().unwrap_or_else(|| panic!("no macro `{name}`"));
    let inner = regex(r"(?m)^\s+(instantiate\w*)\((.*)\)");
    let lines = inner.captures_iter(&found[2]).flat_map(|line| {
        let line = line.unwrap();
        let mut body = line[2].to_string();
        for (parameter, value) in parts(&found[1]).iter().zip(list) {
            body = regex(&format!(r"\b{parameter}\b")).replace_all(&body, fancy_regex::NoExpand(value)).into_owned();
        }
        instantiations(text, &line[1], &parts(&body))
    });
    lines.collect()
}

/// The string that literals side by side are.
fn literal(text: &str) -> String {
    regex(r#""\s*""#).replace_all(text, "").trim_matches('"').into()
}

/// Reads a source: the kernels are those that are no templates, and those that `instantiate` names.
pub fn read(source: &str) -> Source {
    let text = without_comments(source);
    let kernels = definitions(&text);
    let of = |name: &str| {
        let found = kernels.iter().find(|(n, ..)| n == name).unwrap_or_else(|| panic!("no kernel `{name}`"));
        found.1.clone()
    };
    let plain = kernels.iter().filter(|(.., template)| !template);
    let mut instances: Vec<Instance> =
        plain.map(|(name, p, _)| Instance { name: name.clone(), call: name.clone(), parameters: p.clone() }).collect();
    let pattern = regex(r"(?m)^(instantiate\w*)\((.*)\);?$");
    for found in pattern.captures_iter(&text) {
        let found = found.unwrap();
        for list in instantiations(&text, &found[1], &parts(&found[2])) {
            let call = format!("{}<{}>", list[1], list[2..].join(", "));
            instances.push(Instance { name: list[0].clone(), call, parameters: of(&list[1]) });
        }
    }
    Source { text: pattern.replace_all(&text, "").into_owned(), instances }
}

/// What C++ cannot be taught by macros.
fn rewrite(text: &str) -> String {
    let text = regex(r"\bkernel\s+void\b").replace_all(text, "void").into_owned();
    let text = regex(r"(?s)\[\[.*?\]\]").replace_all(&text, "").into_owned();
    let shared = regex(r"(?m)^(\s*)threadgroup\s+(\w+\s+(\w+)\[[^;(){}&=]+\];)");
    let text = shared.replace_all(&text, "${1}MSL_SHARED $2 MSL_POISON($3)").into_owned();
    let text = regex(r"\bthreadgroup\b").replace_all(&text, "").into_owned();
    let vectors = r"\b((?:float|half|int|uint|short|ushort|char|uchar|long|ulong)[234])\s*\(";
    regex(vectors).replace_all(&text, "msl::make<$1>(").into_owned()
}

/// What a parameter is given in a call: a buffer, or the thread's place.
fn argument(parameter: &Parameter) -> String {
    if let Some(k) = parameter.buffer() {
        return if parameter.ty.ends_with('&') {
            format!("msl::Reference{{b[{k}]}}")
        } else {
            format!("msl::Pointer{{b[{k}]}}")
        };
    }
    let three = |place: &str| match parameter.ty.as_str() {
        "uint3" => format!("msl::make<uint3>({place}.x, {place}.y, {place}.z)"),
        "uint2" => format!("msl::make<uint2>({place}.x, {place}.y)"),
        _ => format!("{place}.x"),
    };
    match parameter.attribute.as_str() {
        "threadgroup_position_in_grid" => three("msl::group->position"),
        "threadgroups_per_grid" => three("msl::group->grid"),
        "thread_position_in_grid" => three("msl::grid_position()"),
        "thread_index_in_threadgroup" => "msl::current->index".into(),
        "thread_index_in_simdgroup" => "msl::current->lane".into(),
        "simdgroup_index_in_threadgroup" => "msl::current->index / 32".into(),
        other => panic!("the emulator does not know [[{other}]] of `{}`", parameter.name),
    }
}

/// The C++ of a source after the prelude's.
pub fn to_cpp(prelude: (&str, &str), source: (&str, &str)) -> String {
    let mut out = String::new();
    let Source { text, instances } = read(source.1);
    for (path, text) in [(prelude.0, &without_comments(prelude.1)), (source.0, &text)] {
        writeln!(out, "#line 1 \"{path}\"\n{}", rewrite(text)).unwrap();
    }
    writeln!(out, "#line 1 \"<kernels>\"\nnamespace msl {{\nconst Kernel kernels[] = {{").unwrap();
    for instance in &instances {
        let arguments: Vec<String> = instance.parameters.iter().map(argument).collect();
        let (name, call) = (&instance.name, &instance.call);
        writeln!(out, "  {{\"{name}\", [](void* const* b) {{ ::{call}({}); }}}},", arguments.join(", ")).unwrap();
    }
    writeln!(out, "}};\nconst unsigned kernel_count = {};\n}}", instances.len()).unwrap();
    out
}
