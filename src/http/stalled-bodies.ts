import type { IncomingMessage } from 'node:http';
import type { FastifyInstance } from 'fastify';

/**
 * Calls `onStall` for a request whose body stops coming for `limitMs` (at most twice as long, 0: never): without that
 * whoever sends half a body holds a connection and what was read of it for ever.
 */
export function watchBodies(
  app: FastifyInstance,
  limitMs: () => number,
  onStall: (request: IncomingMessage) => void,
): void {
  app.addHook('onRequest', (request, _reply, done) => {
    const { raw } = request;
    const ms = limitMs();
    if (ms > 0 && !raw.complete) watch(raw, ms, onStall);
    done();
  });
}

function watch(raw: IncomingMessage, ms: number, onStall: (request: IncomingMessage) => void): void {
  let seen = raw.socket.bytesRead;
  const timer = setInterval(() => {
    const read = raw.socket.bytesRead;
    if (raw.complete) clearInterval(timer);
    else if (read === seen) {
      clearInterval(timer);
      onStall(raw);
    }
    seen = read;
  }, ms);
  timer.unref();
  const stop = () => clearInterval(timer);
  raw.once('end', stop);
  raw.once('close', stop);
}
