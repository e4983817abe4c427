// Runs the bundle until baton has answered a first request, and writes down what V8 has compiled by then: the
// executable starts with it. Usage: compiled-code.mjs <bundle> <output>
import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import v8 from 'node:v8';
import { Script } from 'node:vm';

const [, , bundle, output] = process.argv;
// V8 takes compiled code only under the flags that it was written down under: those of a start, before baton sets its own.
v8.setFlagsFromString = () => undefined;
const script = new Script(readFileSync(bundle, 'latin1'), { filename: 'program.cjs' });
const ports = ['--port', '--rpc-port', '--admin-port'].flatMap((flag) => [flag, '0']);
process.argv = [process.argv[0], bundle, 'serve', '--sim', '--host', '127.0.0.1', '--log-format', 'json', ...ports];

const TAKES_IT = `const [, bundle, code] = process.argv;
const [source, cachedData] = [fs.readFileSync(bundle, 'latin1'), fs.readFileSync(code)];
const { cachedDataRejected } = new vm.Script(source, { filename: 'program.cjs', cachedData });
fs.writeSync(1, cachedDataRejected ? 'refused' : 'taken');`;

const up = Promise.withResolvers();
process.stdout.write = () => true;
process.stderr.write = (text) => {
  const facade = /"facade":"([^"]+)".*"baton is up"/.exec(text)?.[1];
  if (facade !== undefined) up.resolve(facade);
  return true;
};
process.on('exit', (code) => {
  if (code !== 0) process._rawDebug('the bundle ended before it was up');
});

script.runInThisContext()(load, { exports: {} }, {});
const reply = await fetch(`http://${await up.promise}/health`);
if (!reply.ok) throw new Error(`the bundle is not healthy: ${reply.status}`);
await reply.arrayBuffer();
const code = script.createCachedData();
writeFileSync(output, code);
const again = spawnSync(process.execPath, ['-e', TAKES_IT, bundle, output], { encoding: 'utf8' });
if (again.stdout !== 'taken') throw new Error(`V8 refuses the compiled code: ${again.stdout}${again.stderr}`);
process.exit(0);

/** As src/executable/main.ts does it. */
function load(name) {
  const found = process.getBuiltinModule(name);
  if (found === undefined) throw Object.assign(new Error(`Cannot find module '${name}'`), { code: 'MODULE_NOT_FOUND' });
  return found;
}
