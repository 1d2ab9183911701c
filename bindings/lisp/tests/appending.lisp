;;;; Appending from many threads, flush, record files, and images.

(in-package #:pelton-tests)

(defun collecting ()
  "Returns a sink that collects the messages of each lane, in order, and a function that returns them: a list of lists."
  (let ((lanes (make-hash-table)))
    (values (lambda (chunks)
              (pelton:do-chunks ((sap size :lane-id lane :messages messages) chunks)
                (let ((found (loop with at = 0
                                   while (< at size)
                                   collect (let ((length (ldb (byte 32 0) (sap-ref-64 sap at))))
                                             (prog1 (pelton:sap-octets (sb-sys:sap+ sap (+ at 8)) length)
                                               (incf at (+ 8 (* 8 (ceiling length 8)))))))))
                  (assert (eql (length found) messages))
                  (setf (gethash lane lanes) (append (gethash lane lanes) found)))))
            (lambda () (loop for messages being the hash-values of lanes collect messages)))))

(defmacro with-collected ((appenders collected &rest options) &body body)
  (let ((sink (gensym)))
    `(multiple-value-bind (,sink ,collected) (collecting)
       (pelton:with-appenders (,appenders ,sink ,@options) ,@body))))

(deftest eight-threads-append-and-every-message-comes-once-and-in-its-order
  (let ((count 50000) (next (make-array 8 :initial-element 0)) (messages 0))
    (pelton:with-appenders (appenders (lambda (chunks)
                                        (pelton:do-records ((sap size) chunks)
                                          (assert (eql size 16))
                                          (let ((thread (sap-ref-64 sap 0)))
                                            (assert (eql (sap-ref-64 sap 8) (aref next thread)))
                                            (incf (aref next thread)))
                                          (incf messages)))
                                      :flush-bytes 65536)
      (let ((threads (loop for thread below 8
                           collect (let ((thread thread))
                                     (in-thread
                                       (dotimes (i count)
                                         (if (evenp i)
                                             (pelton:with-reserved ((sap size) appenders 16)
                                               (setf (sap-ref-64 sap 0) thread (sap-ref-64 sap 8) i))
                                             (let ((octets (number-octets thread 16)))
                                               (setf (sb-kernel:%vector-raw-bits octets 1) i)
                                               (pelton:append-message appenders octets)))))))))
        (mapc #'joined threads))
      ;; The sink has full buffers already, and gets the rest on demand.
      (is (plusp messages))
      (pelton:flush appenders)
      (is (eql messages (* 8 count)))
      (is (every (lambda (next) (eql next count)) next)))
    (is (eql messages (* 8 count)))))

(deftest nothing-is-consed-for-a-message
  (let ((taken 0))
    (pelton:with-appenders (appenders (lambda (chunks)
                                        (pelton:do-chunks ((sap size :messages messages) chunks) (incf taken messages)))
                                      :flush-bytes (ash 1 26))
      (let ((octets (make-octets 16)) (count 1000000))
        (flet ((consed (append)
                 (declare (function append))
                 (funcall append)
                 (let ((before (sb-ext:get-bytes-consed)))
                   (dotimes (i count) (funcall append))
                   (- (sb-ext:get-bytes-consed) before))))
          ;; A flush of 64 MiB conses some; a message that consed would add up to 16 MB here. No other thread runs.
          (is (< (consed (lambda () (pelton:append-message appenders octets))) count))
          (is (< (consed (lambda () (sb-sys:with-pinned-objects (octets)
                                      (pelton:append-sap appenders (sb-sys:vector-sap octets) 16))))
                 count))
          (is (< (consed (lambda () (pelton:with-reserved ((sap size) appenders 16) (setf (sap-ref-64 sap 0) 1))))
                 count))
          (is (< (consed (lambda () (pelton:append-message appenders octets :start 4 :end 12))) count)))))
    (is (eql taken 4000004))))

(deftest a-buffer-is-flushed-when-full-on-demand-and-at-close
  (with-collected (appenders collected :flush-bytes 65536)
    (let ((octets (make-octets 1000)))
      (dotimes (i 60) (pelton:append-message appenders octets))
      (is (null (funcall collected)))
      (dotimes (i 10) (pelton:append-message appenders octets))
      (is (<= 60 (length (first (funcall collected))) 69))
      ;; A flush in any thread does not pass on a reservation that is not committed.
      (pelton:with-reserved ((sap size) appenders 8)
        (joined (in-thread (pelton:flush appenders)))
        (is (eql 70 (length (first (funcall collected))))))
      (pelton:flush appenders)
      (is (eql 71 (length (first (funcall collected)))))))
  (multiple-value-bind (sink collected) (collecting)
    (pelton:with-appenders (appenders sink)
      (pelton:append-message appenders (bytes "at close")))
    (is (equal (mapcar #'text (first (funcall collected))) '("at close")))))

(deftest a-message-larger-than-the-buffer-is-a-condition
  (with-collected (appenders collected :flush-bytes 65536)
    (signals pelton:too-large-error (pelton:append-message appenders (make-octets 65536)))
    (is (null (handler-bind ((pelton:too-large-error #'pelton:drop-message))
                (pelton:append-message appenders (make-octets 65536)))))
    (signals pelton:too-large-error (pelton:with-reserved ((sap size) appenders 65536) nil))
    (pelton:append-message appenders (make-octets 65520))
    (pelton:flush appenders)
    (is (equal (mapcar #'length (first (funcall collected))) '(65520)))))

(deftest a-failing-sink-gets-the-same-messages-again
  (let ((fails t) (taken 0))
    (pelton:with-appenders (appenders (lambda (chunks)
                                        (case fails
                                          ((nil) (pelton:do-records ((sap size) chunks) (incf taken)))
                                          (:throw (throw 'out :thrown))
                                          (t (error "the disk is on fire"))))
                                      :flush-bytes 65536)
      (dotimes (i 100) (pelton:append-message appenders (number-octets i)))
      (let ((condition (signals pelton:sink-error (pelton:flush appenders))))
        (is (search "on fire" (princ-to-string (pelton:sink-error-cause condition)))))
      ;; Nothing of Lisp's unwinds through the library.
      (setf fails :throw)
      (signals pelton:sink-error (catch 'out (pelton:flush appenders)))
      (is (eql taken 0))
      ;; Appending to a full buffer signals it too, with the restart RETRY.
      (let ((tried 0))
        (handler-bind ((pelton:sink-error (lambda (condition)
                                            (incf tried)
                                            (setf fails nil)
                                            (pelton:retry condition))))
          (dotimes (i 10000) (pelton:append-message appenders (number-octets i))))
        (is (eql tried 1)))
      (setf fails nil)
      (pelton:flush appenders)
      (is (eql taken 10100)))))

(deftest a-failing-sink-is-called-once-and-signalled-once
  (let ((calls 0) (signalled 0) (taken 0) (appended 0))
    (flet ((append-until-it-fails (append)
             (setf calls 0 signalled 0)
             (loop until (plusp calls)
                   do (handler-case (progn (funcall append) (incf appended))
                        (pelton:sink-error (condition)
                          (incf signalled)
                          (is (search "this once" (princ-to-string (pelton:sink-error-cause condition)))))))
             (is (equal (list calls signalled) '(1 1)))))
      (pelton:with-appenders (appenders (lambda (chunks)
                                          (when (eql (incf calls) 1) (error "this once"))
                                          (pelton:do-records ((sap size) chunks) (incf taken)))
                                        :flush-bytes 65536)
        (append-until-it-fails (lambda () (pelton:append-message appenders (number-octets 1))))
        (setf calls 1)
        (pelton:flush appenders)
        (is (eql taken appended))
        (append-until-it-fails (lambda () (pelton:with-reserved ((sap size) appenders 8) (setf (sap-ref-64 sap 0) 1))))
        (setf calls 1))
      (is (eql taken appended)))))

(deftest a-sink-error-has-the-cause-of-the-last-failure-also-when-closing
  (let ((fails t) (calls 0))
    (let ((appenders (pelton:open-appenders (lambda (chunks)
                                              (declare (ignore chunks))
                                              (incf calls)
                                              (if (eq fails :throw) (throw 'out nil)
                                                  (when fails (error "for ever")))))))
      (pelton:append-message appenders (bytes "x"))
      (is (typep (pelton:sink-error-cause (signals pelton:sink-error (pelton:sync appenders))) 'error))
      (setf fails :throw)
      (catch 'out
        (is (null (pelton:sink-error-cause (signals pelton:sink-error (pelton:flush appenders))))))
      (setf fails t)
      (is (search "for ever" (princ-to-string (pelton:sink-error-cause (signals pelton:sink-error
                                                                                (pelton:close-handle appenders))))))
      (is (not (pelton:handle-open-p appenders))))
    ;; The macro signals it; if another exit leaves the body, it warns.
    (signals pelton:sink-error (pelton:with-appenders (appenders (lambda (chunks) (declare (ignore chunks))
                                                                         (error "for ever")))
                                 (pelton:append-message appenders (bytes "x"))))
    (let ((warned 0))
      (handler-bind ((warning (lambda (condition) (incf warned) (muffle-warning condition))))
        (is (eq :left (catch 'out (pelton:with-appenders (appenders (lambda (chunks) (declare (ignore chunks))
                                                                            (error "for ever")))
                                    (pelton:append-message appenders (bytes "x"))
                                    (throw 'out :left))))))
      (is (eql warned 1)))
    ;; None is left behind.
    (is (eql 0 (hash-table-count pelton::*sinks*)))
    (signals pelton:option-error (pelton:open-appenders #'identity :appenders-max 100000))
    (signals type-error (pelton:open-appenders #'identity :flush-interval 0))
    (is (eql 0 (hash-table-count pelton::*sinks*)))))

(deftest appending-after-the-close-is-a-usage-error-also-much-later
  (let ((appenders (pelton:open-appenders #'identity)))
    (pelton:append-message appenders (bytes "x"))
    (pelton:close-handle appenders)
    ;; The library recognises a closed handle only for some time, so Lisp must not pass it one.
    (is (every (lambda (own) (zerop (pelton::handle-address own))) (remove nil (pelton::appenders-places appenders))))
    (dotimes (i 200) (pelton:with-appenders (more #'identity) (pelton:append-message more (bytes "y"))))
    (signals pelton:usage-error (pelton:append-message appenders (bytes "z")))
    (signals pelton:usage-error (pelton:with-reserved ((sap size) appenders 8) (error "not reached")))
    (signals pelton:usage-error (joined (in-thread (pelton:append-message appenders (bytes "z")))))))

(deftest a-second-reservation-meanwhile-is-an-error
  (with-collected (appenders collected)
    (flet ((again (handle)
             (pelton:with-reserved ((sap size) handle 16)
               (setf (sap-ref-64 sap 0) 1 (sap-ref-64 sap 8) 2)
               (signals pelton:reserved-error (pelton:with-reserved ((sap size) handle 16) (error "not reached")))
               (setf (sap-ref-64 sap 8) 3))))
      (again appenders)
      (pelton:with-reserved ((sap size) appenders 8) (setf (sap-ref-64 sap 0) 4))
      (pelton:flush appenders)
      (is (equalp (mapcar (lambda (octets) (sb-kernel:%vector-raw-bits octets 0)) (first (funcall collected))) '(1 4)))
      (is (eql 3 (sb-kernel:%vector-raw-bits (first (first (funcall collected))) 1)))
      (pelton:with-channel (sender receiver)
        (again sender)
        (is (eql 3 (sb-kernel:%vector-raw-bits (pelton:receive receiver) 1)))))))

(deftest a-return-ends-a-loop-over-records-and-lanes-have-distinct-ids
  (let ((seen '()) (ids '()))
    (pelton:with-appenders (appenders (lambda (chunks)
                                        (pelton:do-chunks ((sap size :lane-id id) chunks)
                                          (pushnew id ids)
                                          (let ((chunk (sb-sys:sap+ (sb-sys:int-sap (pelton::chunks-address chunks))
                                                                    (* pelton::+sizeof-chunk+ (1- (length ids))))))
                                            (is (eql id (logior (sap-ref-64 chunk 0) (ash (sap-ref-64 chunk 8) 64))))))
                                        (push (pelton:do-records ((sap size) chunks :result :end)
                                                (when (eql (sap-ref-64 sap 0) 2) (return :two))
                                                (when (eql (sap-ref-64 sap 0) 3) (error "it goes on")))
                                              seen)))
      (dolist (number '(1 2 3)) (pelton:append-message appenders (number-octets number)))
      (joined (in-thread (pelton:append-message appenders (number-octets 3))))
      ;; The lane of the first append comes first.
      (pelton:flush appenders)
      (is (equal seen '(:two)))
      (is (eql (length ids) 2))
      (is (every (lambda (id) (plusp (ash id -64))) ids)))))

;;; However WITH-RESERVED is left, the abandoned message is never seen, and the next use, of any kind, works.
(deftest a-body-that-is-left-appends-nothing-and-the-thread-appends-again
  (with-collected (appenders collected)
    (flet ((leave (exit)
             (pelton:with-reserved ((sap size) appenders 16)
               (setf (sap-ref-64 sap 0) 666)
               (funcall exit)))
           (taken ()
             (pelton:flush appenders)
             (mapcar (lambda (octets) (sb-kernel:%vector-raw-bits octets 0)) (first (funcall collected)))))
      (catch 'out (leave (lambda () (throw 'out nil))))
      (pelton:append-message appenders (number-octets 1))
      (signals failed (leave (lambda () (error 'failed :form nil :found nil))))
      (pelton:with-reserved ((sap size) appenders 8) (setf (sap-ref-64 sap 0) 2))
      (block nil (leave (lambda () (return))))
      (is (equal (taken) '(1 2)))
      ;; Inside the body the same thread is refused, by either way to append.
      (pelton:with-reserved ((sap size) appenders 8)
        (setf (sap-ref-64 sap 0) 3)
        (signals pelton:reserved-error (pelton:append-message appenders (number-octets 666))))
      (signals pelton:too-large-error (pelton:with-reserved ((sap size) appenders 8) (setf size 9)))
      (is (equal (taken) '(1 2 3))))))

(deftest a-thread-that-is-terminated-in-a-body-appends-nothing
  (with-collected (appenders collected)
    (let* ((inside (sb-thread:make-semaphore))
           (thread (sb-thread:make-thread
                    (lambda ()
                      (pelton:append-message appenders (bytes "whole"))
                      (pelton:with-reserved ((sap size) appenders 8)
                        (setf (sap-ref-64 sap 0) 666)
                        (sb-thread:signal-semaphore inside)
                        (sb-thread:wait-on-semaphore (sb-thread:make-semaphore) :timeout *limit*))))))
      (is (sb-thread:wait-on-semaphore inside :timeout *limit*))
      (sb-thread:terminate-thread thread)
      (is (eq :ended (sb-thread:join-thread thread :default :ended :timeout *limit*)))
      (pelton:flush appenders)
      (is (equal (mapcar #'text (first (funcall collected))) '("whole"))))))

(deftest places-of-ended-threads-are-used-again
  (with-collected (appenders collected)
    (fill (pelton::appenders-places appenders) (pelton::make-own nil 0 nil))
    (joined (in-thread (pelton:append-message appenders (bytes "new"))
                       (pelton:append-message appenders (bytes "again"))))
    (pelton:flush appenders)
    (is (equal (mapcar #'text (first (funcall collected))) '("new" "again")))))

(deftest too-many-threads-are-refused-with-interrupts-enabled
  (pelton:with-appenders (appenders #'identity :appenders-max 1)
    (pelton:append-message appenders (bytes "x"))
    (is (eq :dropped
            (joined (in-thread
                      (handler-bind ((pelton:refused-error
                                       (lambda (condition)
                                         (is sb-sys:*interrupts-enabled*)
                                         (pelton:flush appenders)
                                         (pelton:drop-message condition))))
                        (if (or (pelton:append-message appenders (bytes "y"))
                                (pelton:with-reserved ((sap size) appenders 8) t))
                            :appended
                            :dropped))))))))

(deftest a-sink-that-uses-its-appenders-is-refused-without-a-deadlock
  (let ((appenders nil) (found nil))
    (pelton:with-appenders (made (lambda (chunks)
                                   (declare (ignore chunks))
                                   (setf found (handler-case (pelton:flush appenders)
                                                 (pelton:refused-error () :refused)))))
      (setf appenders made)
      (pelton:append-message made (bytes "x"))
      (pelton:flush made))
    (is (eq found :refused))))

(deftest appenders-of-ended-threads-are-closed
  (with-collected (appenders collected :appenders-max 4)
    ;; Many more threads than the limit, one after the other.
    (dotimes (i 40) (joined (in-thread (pelton:append-message appenders (number-octets i)))))
    (pelton:flush appenders)
    (is (eql 40 (length (reduce #'append (funcall collected)))))
    (is (null (loop for own across (pelton::appenders-places appenders)
                    when (and own (pelton::own-thread own)) collect own)))
    ;; As many at a time as the limit; one more is refused.
    (let* ((begun (sb-thread:make-semaphore)) (end (sb-thread:make-semaphore))
           (threads (loop repeat 4 collect (in-thread (pelton:append-message appenders (bytes "y"))
                                             (sb-thread:signal-semaphore begun)
                                             (sb-thread:wait-on-semaphore end :timeout *limit*)))))
      (dotimes (i 4) (sb-thread:wait-on-semaphore begun :timeout *limit*))
      (signals pelton:refused-error (pelton:append-message appenders (bytes "z")))
      (sb-thread:signal-semaphore end 4)
      (mapc #'joined threads)
      (is (pelton:append-message appenders (bytes "z"))))))

(deftest threads-find-their-own-among-many
  ;; So many threads that some almost certainly share a first place.
  (with-collected (appenders collected :flush-bytes 65536)
    (let* ((begun (sb-thread:make-semaphore)) (end (sb-thread:make-semaphore))
           (threads (loop for thread below 100
                          collect (let ((thread thread))
                                    (in-thread
                                      (pelton:append-message appenders (number-octets thread))
                                      (sb-thread:signal-semaphore begun)
                                      (sb-thread:wait-on-semaphore end :timeout *limit*)
                                      (dotimes (i 20) (pelton:append-message appenders (number-octets thread))))))))
      (dotimes (i 100) (is (sb-thread:wait-on-semaphore begun :timeout *limit*)))
      (sb-thread:signal-semaphore end 100)
      (mapc #'joined threads)
      (pelton:flush appenders)
      (let ((lanes (funcall collected)))
        (is (eql (length lanes) 100))
        (is (every (lambda (messages) (and (eql (length messages) 21)
                                           (every (lambda (one) (equalp one (first messages))) messages)))
                   lanes))))))

(deftest interrupts-that-unwind-while-appending-lose-nothing-and-leave-nothing-half-done
  (let* ((count 300000) (interrupts 0) (next 0) (last -1)
         ;; The numbers whose append has returned, and those that the sink has.
         (returned (make-array count :element-type 'bit :initial-element 0))
         (taken (make-array count :element-type 'bit :initial-element 0)))
    (pelton:with-appenders (appenders (lambda (chunks)
                                        (pelton:do-records ((sap size) chunks)
                                          (let ((number (sap-ref-64 sap 0)))
                                            (assert (> number last))
                                            (setf last number (bit taken number) 1))))
                                      :flush-bytes 65536)
      (let* ((thread (in-thread
                       (loop while (< next count)
                             do (catch 'out
                                  (loop with *inside* = t
                                        while (< next count)
                                        do (let ((number (sb-sys:without-interrupts (1- (incf next)))))
                                             ;; Not faster than the interrupts come.
                                             (loop until (>= interrupts (floor number 15000)) do
                                                   (sb-thread:thread-yield))
                                             (if (evenp number)
                                                 (pelton:append-message appenders (number-octets number))
                                                 (pelton:with-reserved ((sap size) appenders 8)
                                                   (setf (sap-ref-64 sap 0) number)))
                                             (setf (bit returned number) 1)))))))
             (disturber (in-thread (disturb thread (lambda () (>= next count))
                                            (lambda () (when *inside* (incf interrupts) (throw 'out nil)))))))
        (joined disturber)
        (joined thread)
        (pelton:flush appenders)
        (is (>= interrupts 19))
        (is (null (find 1 (bit-andc2 returned taken))))
        ;; At most one append for each interrupt has not returned.
        (is (<= (count 0 returned) interrupts))))))

(deftest a-lisp-thread-flushes-at-intervals
  (with-collected (appenders collected :flush-interval 0.02)
    (pelton:append-message appenders (bytes "in time"))
    (until (funcall collected))
    (is (equal (mapcar #'text (first (funcall collected))) '("in time")))))

(deftest a-record-file-is-read-back
  (let ((path (in-directory "log")) (read '()))
    (pelton:with-appenders (appenders (pelton:record-file path))
      (let ((threads (loop repeat 3 collect (in-thread (dotimes (i 1000) (pelton:append-message appenders
                                                                                                (number-octets i)))))))
        (mapc #'joined threads))
      (signals pelton:role-taken-error (pelton:open-appenders (pelton:record-file path)))
      (pelton:sync appenders))
    (is (eq :end (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (push octets read)) path)))
    (is (eql (length read) 3000))
    ;; Torn, and damaged.
    (with-open-file (file path :direction :output :if-exists :append :element-type '(unsigned-byte 8))
      (write-sequence #(1 2 3) file))
    (is (eq :torn (pelton:map-record-file (constantly nil) path)))
    (signals pelton:not-a-record-file-error (pelton:map-record-file (constantly nil) "/dev/null"))))

(defun crc-32 (octets)
  (loop with crc = #xffffffff
        for octet across octets
        do (setf crc (logxor crc octet))
           (loop repeat 8 do (setf crc (logxor (ash crc -1) (if (logtest crc 1) #xedb88320 0))))
        finally (return (logxor crc #xffffffff))))

(deftest a-record-file-that-continues-in-a-later-version-is-read-until-there
  (let ((path (in-directory "log")) (read '()) (chunk (make-octets 64)))
    (pelton:with-appenders (appenders (pelton:record-file path))
      (pelton:append-message appenders (bytes "of this version"))
      (pelton:sync appenders))
    (with-open-file (file path :direction :io :if-exists :overwrite :element-type '(unsigned-byte 8))
      (let ((header (make-octets 64)))
        (read-sequence header file)
        ;; A chunk header with the unknown kind 3, and the number of one message; the checksum includes the file's id.
        (replace chunk (bytes "pchk"))
        (setf (aref chunk 4) 3 (aref chunk 32) 1 (aref chunk 36) 1)
        (let ((checksum (crc-32 (concatenate 'vector (subseq header 32 40) (subseq chunk 0 60)))))
          (dotimes (i 4) (setf (aref chunk (+ 60 i)) (ldb (byte 8 (* 8 i)) checksum))))
        (file-position file (file-length file))
        (write-sequence chunk file)))
    (signals pelton:later-version-error
      (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (push (text octets) read)) path))
    (is (equal read '("of this version")))))

(deftest a-damaged-part-of-a-file-is-signalled-and-can-be-skipped
  (let ((path (in-directory "log")))
    (pelton:with-appenders (appenders (pelton:record-file path))
      (dolist (word '("before" "damaged" "behind"))
        (pelton:append-message appenders (bytes word))
        (pelton:flush appenders)))
    (with-open-file (file path :direction :io :if-exists :overwrite :element-type '(unsigned-byte 8))
      (let ((all (make-octets (file-length file))))
        (read-sequence all file)
        (file-position file (search (bytes "damaged") all))
        (write-byte 0 file)))
    (let ((read '()) (signalled 0))
      (is (eq :end (handler-bind ((pelton:damaged-error (lambda (condition)
                                                          (incf signalled)
                                                          (pelton:skip-damage condition))))
                     (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (push (text octets) read))
                                             path))))
      (is (eql signalled 1))
      (is (equal (reverse read) '("before" "behind"))))
    (signals pelton:damaged-error (pelton:map-record-file (constantly nil) path))))

(deftest a-file-beyond-its-limit-is-rotated
  (let ((path (in-directory "log")) (read 0))
    (pelton:with-appenders (appenders (pelton:record-file path :rotate-bytes 100000
                                                          :sync-bytes :each-write :sync-interval 0.01)
                                      :flush-bytes 65536)
      (dotimes (i 3000) (pelton:append-message appenders (make-octets 100))))
    (is (probe-file (concatenate 'string path ".000001")))
    (dolist (file (directory (concatenate 'string path "*.*")))
      (is (eq :end (pelton:map-record-file (lambda (octets seq) (declare (ignore octets seq)) (incf read)) file))))
    (is (eql read 3000))))

(deftest a-receiver-is-flushed
  (multiple-value-bind (sink collected) (collecting)
    (multiple-value-bind (sender receiver) (pelton:make-channel)
      (dotimes (i 100) (pelton:send sender (number-octets i)))
      (pelton:with-flush (flush receiver sink)
        (is (not (pelton:handle-open-p receiver)))
        (is (pelton:flush flush))
        (is (eql 100 (length (first (funcall collected)))))
        (is (null (pelton:run-flush flush :timeout 0.01)))
        (pelton:send sender (bytes "last"))
        (pelton:close-handle sender)
        (is (eq t (pelton:run-flush flush :timeout *limit*)))
        (is (eql 101 (length (first (funcall collected)))))
        (is (null (pelton:flush flush)))))))

(deftest a-saved-image-starts-with-closed-handles-and-opens-new-ones
  (let ((image (in-directory "image")))
    (labels ((sbcl-with (environment &rest arguments)
               (let* ((out (make-string-output-stream))
                      (process (sb-ext:run-program sb-ext:*runtime-pathname* arguments
                                                   :output out :error out
                                                   :environment (append environment (sb-ext:posix-environ)))))
                 (list (sb-ext:process-exit-code process) (get-output-stream-string out))))
             (sbcl (&rest arguments) (apply #'sbcl-with '() arguments)))
      (let ((made (sbcl "--noinform" "--disable-debugger" "--no-sysinit" "--no-userinit"
                        "--eval" "(require :asdf)"
                        "--eval" (format nil "(asdf:load-asd ~s)" (namestring (asdf:system-source-file "pelton")))
                        "--eval" "(asdf:load-system \"pelton\")"
                        ;; Handles are open when it is saved, one with its own thread.
                        "--eval" "(defvar *channel* (multiple-value-list (pelton:make-channel)))"
                        "--eval" (format nil "(defvar *appenders* (pelton:open-appenders (lambda (chunks)
(pelton:do-records ((sap size) chunks)
                                                (format t \"flushed ~~d~~%\" size) (finish-output))) :flush-interval
                                                3600))")
                        "--eval" "(pelton:append-message *appenders* (pelton:make-octets 5))"
                        "--eval" (format nil "(sb-ext:save-lisp-and-die ~s)" image))))
        (is (eql (first made) 0))
        (is (search "flushed 5" (second made))))
      (let ((run (sbcl "--core" image "--noinform" "--disable-debugger" "--no-sysinit" "--no-userinit"
                       "--eval" "(assert (not (pelton:handle-open-p *appenders*)))"
                       "--eval" "(handler-case (pelton:send (first *channel*) (pelton:make-octets 1)) (pelton:usage-error () (format t \"closed~%\")))"
                       "--eval" "(pelton:with-appenders (a (lambda (chunks) (pelton:do-records ((sap size) chunks) (format t \"again ~d~%\" size))))
                                   (pelton:append-message a (pelton:make-octets 7)))"
                       "--eval" "(pelton:with-channel (s r) (pelton:send s (pelton:make-octets 3)) (format t \"received ~d~%\" (length (pelton:receive r))))"
                       ;; Appenders that nobody closes are flushed when the process exits.
                       "--eval" "(defvar *left* (pelton:open-appenders (lambda (chunks) (pelton:do-records ((sap size) chunks) (format t \"left ~d~%\" size)))))"
                       "--eval" "(pelton:append-message *left* (pelton:make-octets 9))"
                       "--eval" "(sb-ext:exit)")))
        (is (eql (first run) 0))
        (is (search "closed" (second run)))
        (is (search "again 7" (second run)))
        (is (search "received 3" (second run)))
        (is (search "left 9" (second run))))
      ;; An exit within the body leaves open the appenders of threads that still run.
      (let ((run (sbcl "--core" image "--noinform" "--disable-debugger" "--no-sysinit" "--no-userinit"
                       "--eval" "(defvar *begun* (sb-thread:make-semaphore))"
                       "--eval" "(pelton:with-appenders (a (lambda (chunks) (pelton:do-chunks ((sap size) chunks))))
                                   (sb-thread:make-thread (lambda ()
                                                            (pelton:append-message a (pelton:make-octets 16))
                                                            (sb-thread:signal-semaphore *begun*)
                                                            (loop (pelton:append-message a (pelton:make-octets 16)))))
                                   (sb-thread:wait-on-semaphore *begun*)
                                   (pelton:append-message a (pelton:make-octets 3))
                                   (sb-ext:exit :code 7))")))
        (is (equal run '(7 ""))))
      ;; A message that the heap has no space for is signalled, and remains.
      (let ((run (sbcl "--core" image "--dynamic-space-size" "160" "--noinform" "--lose-on-corruption" "--disable-ldb"
                       "--disable-debugger" "--no-sysinit" "--no-userinit"
                       "--eval" "(pelton:with-channel (s r :capacity (ash 1 28))
                                   (pelton:with-reserved ((sap size) s 130000000) (setf (sb-sys:sap-ref-8 sap 9) 7))
                                   (handler-case (pelton:receive r)
                                     (pelton:too-small-error (condition) (format t \"signalled: ~a~%\" condition)))
                                   (pelton:with-received ((sap size) r) (format t \"~d, ~d~%\" size (sb-sys:sap-ref-8
                                   sap 9))))"
                       "--eval" "(sb-ext:exit)")))
        (is (eql (first run) 0))
        (is (search "the message has 130,000,000 bytes" (second run)))
        (is (search "130000000, 7" (second run))))
      ;; Without the library, opening signals that.
      (let ((run (sbcl-with '("PELTON_LIBRARY=/nowhere") "--core" image "--noinform" "--disable-debugger" "--no-sysinit"
                            "--no-userinit"
                            "--eval" "(handler-case (pelton:make-channel) (error (condition) (format t \"signalled: ~a~%\" condition)))"
                            "--eval" "(sb-ext:exit)")))
        (is (eql (first run) 0))
        (is (search "signalled: pelton: " (second run)))))))
