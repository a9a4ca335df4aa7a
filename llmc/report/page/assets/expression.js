// Cost expressions, as llmc/prediction/cost_expression.py reads them; the text is parsed here and never given to eval.
//
//   sum = product (("+" | "-") product)*    product = factor ("*" factor)*
//   factor = number | symbol | "Min" "(" sum ("," sum)* ")" | "(" sum ")"

const TOKEN = /\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[A-Za-z_]\w*|[-+*(),])/y;
const compiled = new Map();

// A function from the symbols' values, {T, L, R, C, A}, to a number. Throws for anything outside the grammar.
export function expression(text) {
  let found = compiled.get(text);
  if (!found) {
    found = parse(text);
    compiled.set(text, found);
  }
  return found;
}

function parse(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) throw new Error(`unexpected ${text.slice(at, at + 20)}`);
    tokens.push(match[1]);
  }
  let next = 0;
  const take = (token) => (tokens[next] === token ? (next++, true) : false);
  const expect = (token) => { if (!take(token)) throw new Error(`${token} is missing in ${text.slice(0, 80)}`); };

  function sum() {
    const terms = [];
    let sign = take("-") ? -1 : 1;
    for (;;) {
      terms.push([sign, product()]);
      if (take("+")) sign = 1;
      else if (take("-")) sign = -1;
      else return (values) => terms.reduce((total, [s, term]) => total + s * term(values), 0);
    }
  }
  function product() {
    const factors = [factor()];
    while (take("*")) factors.push(factor());
    return factors.length === 1 ? factors[0] : (values) => factors.reduce((total, f) => total * f(values), 1);
  }
  function factor() {
    const token = tokens[next++];
    if (token === undefined) throw new Error(`it ends too early: ${text.slice(0, 80)}`);
    if (/^\d/.test(token)) {
      const number = Number(token);
      return () => number;
    }
    if (token === "(") {
      const inner = sum();
      expect(")");
      return inner;
    }
    if (token === "Min") {
      expect("(");
      const terms = [sum()];
      while (take(",")) terms.push(sum());
      expect(")");
      return (values) => Math.min(...terms.map((term) => term(values)));
    }
    if (!/^[A-Za-z_]/.test(token)) throw new Error(`unexpected ${token} in ${text.slice(0, 80)}`);
    return (values) => {
      if (!Object.hasOwn(values, token)) throw new Error(`unknown symbol ${token}`);
      return values[token];
    };
  }

  const whole = sum();
  if (next < tokens.length) throw new Error(`unexpected ${tokens[next]} in ${text.slice(0, 80)}`);
  return whole;
}
