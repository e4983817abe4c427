// Makes scripts of a program, so that a start reads no more of it than it needs: each is an object of functions, a module
// each, and is read when one of its modules is asked for (src/executable/modules.ts).
import { isBuiltin } from 'node:module';
import { basename } from 'node:path';

/** Modules of Node that take long to open: their functions open them when they are called. */
const LATE = /^(node:)?crypto$/;

/** Whether a name stands for a function and no class. */
const isCallable = (path, name) => /^[a-z]/.test(name) && typeof process.getBuiltinModule(path)[name] === 'function';

/** Node's own modules, imported by name: each name is taken from its module once, and one that nobody uses not at all. */
export const nodeNames = {
  name: 'node-names',
  setup: ({ onResolve, onLoad }) => {
    onResolve({ filter: /.*/ }, ({ path, kind }) =>
      kind === 'import-statement' && isBuiltin(path)
        ? { path, namespace: 'node-names', sideEffects: false }
        : undefined,
    );
    onLoad({ filter: /.*/, namespace: 'node-names' }, ({ path }) => {
      const names = Object.keys(process.getBuiltinModule(path)).filter((name) => name !== 'default');
      const take = names.map((name, at) =>
        LATE.test(path) && isCallable(path, name)
          ? `const v${at} = (...args) => late().${name}(...args);`
          : `const v${at} = /* @__PURE__ */ take('${name}');`,
      );
      const give = names.map((name, at) => `v${at} as ${name}`);
      return {
        contents: `const own = /* @__PURE__ */ process.getBuiltinModule('${path}');
          const take = (name) => own[name];
          let opened;
          const late = () => (opened ??= process.getBuiltinModule('${path}'));
          ${take.join('\n')}
          export { ${give.join(', ')} };
          export default own;`,
      };
    });
  },
};

/**
 * What esbuild wrote for the `entry` (`format: 'esm'`, `splitting`) as scripts: each has the modules that its `sources` need
 * and no script before it has; the last one also has all others, and `more`, CommonJS modules by their names.
 */
export function splitProgram({ metafile, outputFiles }, entry, sources, more) {
  const { outputs } = metafile;
  const outputOf = Object.fromEntries(Object.entries(outputs).map(([path, { entryPoint }]) => [entryPoint, path]));
  const textOf = new Map(outputFiles.map(({ path, text }) => [basename(path), text]));
  const scripts = {};
  const add = (path, modules) => {
    const name = basename(path);
    const text = textOf.get(name);
    if (text === undefined) return;
    textOf.delete(name);
    modules.push(`"./${name}":${asFunction(name, text)}`);
    for (const { path: next, kind } of outputs[path].imports) if (kind === 'import-statement') add(next, modules);
  };
  const last = Object.keys(sources).at(-1);
  for (const [script, wanted] of Object.entries(sources)) {
    const modules = [];
    for (const source of wanted) {
      if (outputOf[source] === undefined) throw new Error(`${source} is no module of its own: nothing loads it late`);
      add(outputOf[source], modules);
    }
    if (script === last) {
      for (const path of Object.keys(outputs)) add(path, modules);
      for (const [name, text] of Object.entries(more)) {
        const body = `"use strict";const module={exports};${text};Object.assign(exports,module.exports);`;
        modules.push(`"./${name}":function(require,exports){${body}}`);
      }
    }
    scripts[script] = `({${modules.join(',\n')}})`;
  }
  return { first: `./${basename(outputOf[entry])}`, scripts };
}

const IMPORT = /(?<=^|[;}\n])import(?:\{([^{}]*)\}from)?"(\.\/[^"]+)";/g;
const IMPORT_LATE = /\bimport\("([^"]+)"\)/g;
// Behind them stand no more than comments about licences.
const EXPORT = /\bexport\{([^{}]*)\};(?=\s*(?:\/\*[\s\S]*\*\/\s*)?$)/;
const EXPORT_DEFAULT = /\bexport default ([^;]+);(?=\s*(?:\/\*[\s\S]*\*\/\s*)?$)/;

/** An ES module of esbuild's as a function. A statement that is left over ends the build: V8 does not take it there. */
function asFunction(name, text) {
  const body = text
    .replaceAll(IMPORT, (_, names, from) =>
      names === undefined ? `require("${from}");` : `const {${names.replaceAll(' as ', ':')}}=require("${from}");`,
    )
    .replaceAll(IMPORT_LATE, (_, from) => `Promise.resolve().then(()=>${asNamespace(from)})`)
    .replace(EXPORT, (_, names) => {
      const pairs = names.split(',').map((pair) => pair.split(' as '));
      for (const [own] of pairs) refuseChanging(name, text, own);
      return `Object.assign(exports,{${pairs.map(([own, shown = own]) => `${shown}:${own}`).join(',')}});`;
    })
    .replace(EXPORT_DEFAULT, 'exports.default=$1;');
  if (/\bimport\(/.test(body)) throw new Error(`${name} imports what is known only when it runs`);
  return `function(require,exports){"use strict";${body}}`;
}

/** What `import()` of a module gives: Node's own are their default as well. */
function asNamespace(from) {
  const module = `require("${from}")`;
  return isBuiltin(from) ? `Object.create(${module},{default:{value:${module}}})` : module;
}

/** Importers get what a name holds when its module has run: none may get another value later. */
function refuseChanging(module, text, name) {
  const own = name.replaceAll('$', '\\$');
  const writes =
    text.match(new RegExp(`(?<![.\\w$])${own}(?:\\+\\+|--|(?:[-+*/%&|^]|\\?\\?|&&|\\|\\|)?=(?![=>]))`, 'g')) ?? [];
  if (writes.length > 1 || name.startsWith('init_')) throw new Error(`${module} changes ${name}, which it exports`);
}
