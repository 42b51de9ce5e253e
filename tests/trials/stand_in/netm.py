import sys, subprocess, time, faulthandler
sys.path[:0]=['$ROOT/mt/src','$ROOT/mt/tests/support']
from hosts import hosts
with hosts(2, **({} )) as (one, two):
    for mode, size, ms in [("async", 8000000, 20), ("async", 8000000, 20), ("async", 8000000, 20), ("nested", 8000000, 20), ("nested", 8000000, 20)]:
        port = str(20000 + int(time.time()*10) % 10000)
        s = one.popen(['$ROOT/net','serve',port,mode,str(size),str(ms)], stdout=subprocess.PIPE, text=True)
        c = two.popen(['$ROOT/net','call',one.address,port,str(size)], stderr=subprocess.PIPE)
        time.sleep(2.5)
        try: print('   promoted', [x.promoted for x in one.sidestep.connections()], flush=True)
        except Exception as e: print(e)
        print(mode, size, ms, s.communicate()[0].strip().replace('\n','; '), s.returncode, flush=True)
        import fcntl, os; os.set_blocking(c.stderr.fileno(), False); print("sender:", c.stderr.read()); c.kill(); c.wait()
