import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import type { FastifyInstance } from 'fastify';

/**
 * Makes `app.close()` wait for running requests alone. Node would also wait for connections that never carried a request,
 * and for kept ones whose request ended after the close began: with no time limit, because it stops its own checks.
 */
export function closeUnusedConnections(app: FastifyInstance): void {
  /** Requests under way on each open connection. */
  const running = new Map<Socket, number>();
  let closing = false;
  const server: Server = app.server;
  // A start without TLS does not load it to ask.
  const isSecure = 'setSecureContext' in server;
  /** Connections without their TLS handshake yet, by the peer. */
  const shaking = new Map<string, Socket>();
  if (isSecure) {
    server.on('connection', (socket: Socket) => {
      const peer = peerOf(socket);
      shaking.set(peer, socket);
      socket.once('close', () => void (shaking.get(peer) === socket && shaking.delete(peer)));
    });
  }
  server.on(isSecure ? 'secureConnection' : 'connection', (socket: Socket) => {
    shaking.delete(peerOf(socket));
    if (closing) {
      socket.destroy();
      return;
    }
    running.set(socket, 0);
    socket.once('close', () => running.delete(socket));
  });
  server.on('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
    running.set(socket, (running.get(socket) ?? 0) + 1);
    response.once('close', () => {
      const left = (running.get(socket) ?? 1) - 1;
      if (running.has(socket)) running.set(socket, left);
      if (closing && left === 0) socket.destroySoon();
    });
  });
  app.addHook('preClose', async () => {
    closing = true;
    for (const [socket, requests] of running) if (requests === 0) socket.destroy();
    for (const socket of shaking.values()) socket.destroy();
  });
}

function peerOf({ remoteAddress, remotePort }: Socket): string {
  return `${remoteAddress} ${remotePort}`;
}
