import type { IncomingMessage } from 'node:http';

/** How long the rest of a refused request is still taken and thrown away, milliseconds. */
const LINGER_MS = 2000;

/**
 * Lets a client read the answer to a request whose body is not taken: what it still sends to a socket that was closed
 * would reset the connection, and the answer would be lost with it. Only the writing side is closed after the answer.
 */
export function lingerAfter({ socket }: IncomingMessage): void {
  socket.destroySoon = () => {
    socket.end();
    const timer = setTimeout(() => socket.destroy(), LINGER_MS);
    socket.once('close', () => clearTimeout(timer));
  };
}
