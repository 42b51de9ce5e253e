// Echo with Node's streams.
"use strict";
const fs = require("fs");
const net = require("net");
const HOST = "127.0.0.1";
const NUDGE = 1000;
const [what, port, connections, place] = process.argv.slice(2);

if (what === "server") {
	const server = net.createServer({ allowHalfOpen: true }, (socket) => socket.pipe(socket));
	server.listen({ host: HOST, port: 0, backlog: 128 }, () => console.log(server.address().port));
} else {
	for (let number = 0; number < Number(connections); number++) {
		const socket = net.connect({ host: HOST, port: Number(port), allowHalfOpen: true });
		const got = [];
		let owed = 0; // of what was sent while the test wants to see it exchange a little
		const go = () => {
			if (fs.existsSync(`${place}/wait`))
				socket.write(Buffer.alloc((owed = NUDGE)));
			else
				socket.end(fs.readFileSync(`${place}/${number}.in`));
		};
		socket.on("data", (data) => {
			if (!owed)
				return got.push(data);
			owed -= data.length;
			if (!owed)
				go();
		});
		socket.on("end", () => fs.writeFileSync(`${place}/${number}.out`, Buffer.concat(got)));
		go();
	}
}
