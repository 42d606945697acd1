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
    let pattern = regex(r"(?m)^(instantiate|instantiate_types)\((.*)\);?$");
    for found in pattern.captures_iter(&text) {
        let found = found.unwrap();
        let list = parts(&found[2]);
        let name = list[0].trim_matches('"');
        let types: &[(&str, &str)] = match &found[1] {
            "instantiate" => &[("", "")],
            _ => &[("_f32", "float"), ("_f16", "half"), ("_bf16", "bf16")],
        };
        for (suffix, ty) in types {
            let first = if ty.is_empty() { None } else { Some(ty.to_string()) };
            let arguments: Vec<String> = first.into_iter().chain(list[2..].iter().cloned()).collect();
            let call = format!("{}<{}>", list[1], arguments.join(", "));
            instances.push(Instance { name: format!("{name}{suffix}"), call, parameters: of(&list[1]) });
        }
    }
    Source { text: pattern.replace_all(&text, "").into_owned(), instances }
}

/// What C++ cannot be taught by macros.
fn rewrite(text: &str) -> String {
    let text = regex(r"\bkernel\s+void\b").replace_all(text, "void").into_owned();
    let text = regex(r"(?s)\[\[.*?\]\]").replace_all(&text, "").into_owned();
    let text = regex(r"(?m)^(\s*)threadgroup\s+([^;(){}*&=]+;)").replace_all(&text, "${1}MSL_SHARED $2").into_owned();
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
        writeln!(out, "  {{\"{name}\", [](void* const* b) {{ {call}({}); }}}},", arguments.join(", ")).unwrap();
    }
    writeln!(out, "}};\nconst unsigned kernel_count = {};\n}}", instances.len()).unwrap();
    out
}
